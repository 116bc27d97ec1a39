"""Downloads from the Hugging Face hub, by `snakemake fetch` only, and conversion of weights to other formats."""
