# Input functions of rules/filter.smk.


def filter_gpus(wildcards):
    """Resource function: 1 if the filter's recipe uses a CLIP, else 0."""
    return int(RUNS.by_folder(wildcards.run).settings["filter"].clip is not None)
