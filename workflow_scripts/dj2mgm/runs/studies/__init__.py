"""Studies: the variants of each design, batches and trials of searches, and looks of `snakemake decide`."""
