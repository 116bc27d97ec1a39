"""Training of the parts of tiny models, and tiny models of transformers' classes that are made from them."""
