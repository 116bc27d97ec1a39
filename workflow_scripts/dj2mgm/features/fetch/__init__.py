"""Downloads of models, datasets and benchmarks from the Hugging Face hub, by `snakemake fetch` only."""
