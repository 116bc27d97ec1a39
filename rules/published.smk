# Parts of a run that are published, and the files that they are made from.
from dj2mgm.config.publishing import publish_settings, records_of


def records(*names):
    """Input function: the files whose figures a card states, in all folders or the named ones."""

    def files(wildcards):
        found = records_of(RUNS, RUNS.at(wildcards.run))
        return [
            path
            for name, path in found.items()
            if not names or name.split("/")[0] in names
        ]

    return files


def published(wildcards):
    """Input function: the files of `snakemake publish`, with a push to each named repository.

    Settings that may not be published are refused before anything runs.
    """
    experiment = RUNS.publish["experiment"]
    keys = {"model": "repository", "dataset": "dataset_repository"}
    files = [
        f"{part}.pushed.json" if RUNS.publish[key] else f"{part}/README.md"
        for part, key in keys.items()
    ]
    found = wanted(
        experiment, *(f"results/published/{PLACE}{experiment}/{file}" for file in files)
    )(wildcards)
    with user_errors():
        publish_settings(RUNS, RUNS.first(experiment))
    return found


def stage_folder(wildcards):
    return RUNS.stage(RUNS.at(wildcards.run), "finetune")
