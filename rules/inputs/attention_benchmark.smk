# Input functions of rules/attention_benchmark.smk.
from dj2mgm.runs.experiments import REFERENCE


def reference_model_files(wildcards):
    """Input function: the reference's model."""
    return list_model_files(RUNS.first_seed(REFERENCE).config.model)
