# Input functions of rules/analyze.smk.


def analyzed_files(wildcards):
    """Input function: the CLIP, and the recipe's files, that a dataset is analyzed with."""
    run = pages.find_analyzed(RUNS, wildcards.dataset)
    recipe_inputs = find_recipe_files(run.settings["filter"].recipe)
    return user_files(list_clip_files(run.config.model.clip) + recipe_inputs)
