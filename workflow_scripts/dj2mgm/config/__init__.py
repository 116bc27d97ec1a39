"""Configuration: merged layers, experiments, runs (seeds and folders), reuse of stages, the table of stages, pages."""
