"""Memory in use: of GPUs, machine, control group and process tree, sampled while a stage runs."""
