"""Tasks of lmms-eval: `snakemake evaluate`, and this project's models in lmms-eval's own command."""
