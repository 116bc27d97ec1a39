# Input functions of rules/filter.smk.


def filter_gpus(wildcards):
    """Resource function: 1 if the filter's recipe uses a CLIP, else 0."""
    return int(RUNS.by_folder(wildcards.run).settings["filter"].clip is not None)


def filter_memory(wildcards):
    """Resource function: the memory of the filter in MB, which may measure with CLIP."""
    return CLIP_STAGE_MB if filter_gpus(wildcards) else SMALL_STAGE_MB
