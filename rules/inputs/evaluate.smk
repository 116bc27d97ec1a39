# Input functions of the rules that evaluate models.
from dj2mgm.runs.evaluations import DATA_SUFFIXES, check_lmms_eval
from dj2mgm.storage.files import find_files


def pretrained_flags(wildcards):
    """Params function: the flag for stage 1's folder, if there is one."""
    projector = projector_file(wildcards)
    return [f"--pretrained={os.path.dirname(projector)}"] if projector else []


def benchmark_files(wildcards):
    """Input function: the user's own files of a benchmark, without the folder of its images."""
    settings = RUNS.by_folder(wildcards.run).settings.get(
        f"benchmarks/{wildcards.benchmark}"
    )
    if settings is None:
        raise UserError(
            f"benchmarks.{wildcards.benchmark} is not set: name its files in config/config.yaml"
        )
    files = settings.files
    return user_files(file for kind, file in files.items() if kind != "images")


def benchmark_images(wildcards):
    """Params function: a digest of the images that a benchmark's files name."""
    settings = RUNS.by_folder(wildcards.run).settings.get(
        f"benchmarks/{wildcards.benchmark}"
    )
    files = settings.files if settings else {}
    folder = files.get("images")
    return FINGERPRINTS.hash_images(
        (file, folder) for kind, file in files.items() if folder and kind != "images"
    )


def benchmark_outputs(benchmark, name):
    """Return a file of a benchmark, for every run in the challenge's table; a model before training submits nothing."""
    return sorted(
        {
            f"{run['benchmarks'][benchmark]}/{name}"
            for run in challenge_settings()["runs"]
            if run["seed"] is not None or name != "submission.xlsx"
        }
    )


def challenge_files(names, file):
    """Return a file of each of these benchmarks that the challenge scores, for every run in its table."""
    benchmarks = [name for name in challenge_settings()["scores"] if name in names]
    return [path for name in benchmarks for path in benchmark_outputs(name, file)]


def answering_weights(wildcards):
    """Input function: the weights that answer a benchmark or a task of lmms-eval; none before training."""
    folder = wildcards.get("benchmarks") or wildcards.evaluations
    if folder.startswith("base_"):
        return []
    metrics = stage_output("finetune", "metrics.json")(wildcards)
    return [*finetuned_files(wildcards), metrics]


def finetuned_flags(wildcards):
    """Params function: the flag for stage 2's folder; none before training."""
    weights = answering_weights(wildcards)
    return [f"--finetuned={os.path.dirname(weights[-1])}"] if weights else []


def evaluation_data(wildcards):
    """Input function: the files of a task's data, without leftover files of downloads."""
    with user_errors():
        if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
            check_lmms_eval()
        files = find_files(evaluation_settings(wildcards.task)["data"], DATA_SUFFIXES)
    return user_files(map(str, files))


def evaluation_report(wildcards):
    """Input function: the report of all compared experiments, with the scores of tasks."""
    if not RUNS.shared.evaluations:
        raise UserError(
            "evaluations is empty: name tasks of lmms-eval in config/config.yaml, or with "
            "--config 'evaluations=[pope]' (docs/evaluation.md)"
        )
    for task in RUNS.shared.evaluations:
        evaluation_settings(task)
    return target_files("evaluate", f"results/{RESULTS_PREFIX}report/report.html")(
        wildcards
    )


def reference_model_files(wildcards):
    """Input function: the reference's model."""
    return complete_model_files(RUNS.first_seed(REFERENCE).config.model)


def influence_page(wildcards):
    """Input function: the page of wrong answers of the experiment that the configuration names."""
    experiment = RUNS.shared.experiment or REFERENCE
    page = f"results/{RESULTS_PREFIX}{experiment}/influence/influence.html"
    return target_files(experiment, page)(wildcards)
