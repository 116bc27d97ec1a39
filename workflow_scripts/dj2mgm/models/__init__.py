"""MGM, vision-language models of transformers, and their common interface."""
