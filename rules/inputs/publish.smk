# Input functions of rules/publish.smk.
from dj2mgm.cli.console import UserError
from dj2mgm.runs.publication import build_publish_settings, list_records


def record_files(*names):
    """Return the input function of the files whose figures a card states, in all folders or in the folders `names`."""

    def files(wildcards):
        records = list_records(RUNS, RUNS.by_folder(wildcards.run))
        return [
            path
            for name, path in records.items()
            if not names or name.split("/")[0] in names
        ]

    return files


def publication_files(wildcards):
    """Input function: the files of `snakemake publish`, with a push to each named repository.

    Settings that may not be published are refused before anything runs.
    """
    with raising_user_errors():
        experiments = RUNS.experiments.list_requested("dj_synth")
    keys = {"model": "repository", "dataset": "dataset_repository"}
    files = [
        (
            f"{part}.pushed.json"
            if getattr(RUNS.shared.publish, key)
            else f"{part}/README.md"
        )
        for part, key in keys.items()
    ]
    if len(experiments) > 1 and any(".pushed" in file for file in files):
        raise UserError(
            "publish: one repository holds one experiment; name one in `experiment`"
        )
    inputs = []
    for experiment in experiments:
        target_files(experiment)(wildcards)
        run = RUNS.first_seed(experiment)
        inputs += [f"results/published/{run.folder}/{file}" for file in files]
        with raising_user_errors():
            build_publish_settings(RUNS, run)
    return inputs


def finetune_folder(wildcards):
    """Params function: the folder of stage 2."""
    return RUNS.find_stage_folder(RUNS.by_folder(wildcards.run), "finetune")
