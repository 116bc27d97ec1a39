"""Models: MGM, vision-language models of transformers, and the interface through which stages use both."""
