"""Settings of pages that compare experiments, of crates, exports and analyses."""

from pathlib import Path

from dj2mgm.datasets.experiment_dataset import RESULTS
from dj2mgm.divergence import DIVERGED
from dj2mgm.errors import InputError
from dj2mgm.records.publication_settings import ExportSettings, RecipeContents
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.leaks import leaks_folder
from dj2mgm.runs.run import Run, Runs
from dj2mgm.runs.stages import LEAKS, STAGES, TASK_PREFIXES, TRAINING
from dj2mgm.runs.studies.searches import full_trials, known_batches
from dj2mgm.runs.studies.study_designs import read_setting

DATASET_FILES = ("summary.json", "pretrain.jsonl", "evaluation.jsonl")  # files of a dataset that pages read
LOG_END = 20_000  # bytes at the end of a log, in which a diverged training is reported
NOT_RECORDED = ("crate", "crate_folders", "overwrite")  # these keys belong to a command, not to a run

# keys that do not affect the results of an experiment; pages are not written again if one of them changes
NOT_SHOWN = {"seed", "description", "controls", "overwrite", "experiment", "decide"}


def page_folder(runs: Runs, experiment: str) -> str:
    """Return the folder of an experiment's page, below results/.

    Compared experiments share results/report/. Each other experiment has a page with itself and the reference.
    """
    compared = experiment in runs.shared.report.experiments and experiment != REFERENCE
    return f"{runs.place}report" if compared else f"{runs.place}{experiment}/report"


def experiments_on(runs: Runs, page: str) -> list[str]:
    """Return the experiments of a page with their controls, beginning with the one that others are compared with."""
    page_name = page.removeprefix(runs.place)
    compared = runs.shared.report.experiments if page_name == "report" else [REFERENCE, str(Path(page_name).parent)]
    variants = runs.experiments.variants
    return list(dict.fromkeys(experiment for name in compared for experiment in (name, *variants.get(name, ()))))


def study_experiments(runs: Runs, study: str) -> list[str]:
    """Return the experiments on a study's page, beginning with the one that others are compared with.

    Raises:
        InputError: the study is not valid.
    """
    runs.experiments.require(study)
    settings, variants = runs.experiments.studies[study], runs.experiments.variants[study]
    names = [settings.experiment, *variants]
    if settings.page.reference and (reference := f"{settings.experiment}-{settings.page.reference}") in names:
        names.insert(0, reference)
    if search := runs.experiments.searches.get(study):
        trained = {name for record in known_batches(search) for name in record.names} - {settings.experiment}
        shown_names = {name for name in full_trials(search) if not has_diverged(runs, name)}
        names = [name for name in names if name not in trained or name in shown_names]
    return list(dict.fromkeys(names))


def has_diverged(runs: Runs, experiment: str, seeds: list[int] | None = None) -> bool:
    """Return whether an experiment's training diverged for any of its seeds. It would diverge again."""
    for seed in seeds or runs.experiments.configs[experiment].seeds:
        run = runs.get(experiment, seed)
        for stage in (stage for stage in TRAINING if stage in run.settings):
            folder = Path(runs.stage_folder(run, stage))
            finished = (folder / STAGES[stage].outputs[-1]).is_file()
            if not finished and any(DIVERGED in _end(log) for log in folder.glob("*.log")):
                return True
    return False


def _end(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END))
        return file.read().decode(errors="replace")


def study_settings(runs: Runs, study: str) -> dict:
    """Return the settings of a study's page."""
    names, changes = study_experiments(runs, study), runs.experiments.changes
    settings = page_settings(runs, names)
    keys = dict.fromkeys(key for name in names for key in changes.get(name, {}))
    for experiment in settings["experiments"]:
        config = runs.experiments.configs[experiment["name"]]
        if "control" not in experiment:
            experiment["changes"] = {key: read_setting(config, experiment["recipes"], key) for key in keys}
    return settings | {
        "study": runs.experiments.studies[study].model_dump(include={"experiment", "description", "page"})
    }


def page_settings(runs: Runs, experiments: list[str], seeds: list[int] | None = None) -> dict:
    """Return the settings of a page that compares experiments.

    References also have the seeds of all other experiments. If `seeds` is given, every experiment has these instead.

    Raises:
        InputError: one of them is not valid.
    """
    runs.experiments.require(*experiments)
    stated = {name: runs.experiments.configs[name].seeds for name in experiments}
    every = list(dict.fromkeys(seed for own_seeds in stated.values() for seed in own_seeds))
    controls = [runs.experiments.controls[name] for name in experiments if name in runs.experiments.controls]
    references = {experiments[0], *(control.compared[1] for control in controls if control.compared)}
    described = []
    for name in experiments:
        page_seeds = seeds or (every if name in references else stated[name])
        own_runs = [runs.get(name, seed) for seed in page_seeds]
        config = own_runs[0].config.model_dump(exclude=NOT_SHOWN)
        described.append(
            {
                "name": name,
                "description": runs.experiments.configs[name].description,
                "dataset": f"{RESULTS}/{own_runs[0].dataset.name}",
                "leaks": leaks_folder(own_runs[0].dataset),
                "licenses": own_runs[0].dataset.settings.licenses,
                "config": config,
                "recipes": read_recipes(runs.experiments.configs[name]),
                "runs": [{"seed": run.seed, "stages": _stages(runs, run)} for run in own_runs],
            }
            | _control(runs, name)
        )
    return {"experiments": described}


def _control(runs: Runs, name: str) -> dict:
    """Return the kind of a control, its experiment and its comparison; nothing for other experiments."""
    variant = runs.experiments.controls.get(name)
    if not variant:
        return {}
    compared = list(variant.compared) if variant.compared else None
    return {"control": {"kind": variant.control, "experiment": variant.parent, "compared": compared}}


def page_files(runs: Runs, experiments: list[str], seeds: list[int] | None = None) -> list[str]:
    """Return all files that a page of these experiments reads; arguments and errors are those of `page_settings`."""
    files = set()
    for experiment in page_settings(runs, experiments, seeds)["experiments"]:
        files |= {f"{experiment['dataset']}/{name}" for name in DATASET_FILES}
        files |= {f"{experiment['leaks']}/{name}" for name in LEAKS if experiment["leaks"]}
        for run in experiment["runs"]:
            for stage, folder in run["stages"].items():
                files |= {f"{folder}/{name}" for name in runs.stages[stage].outputs}
    return sorted(files)


def find_analyzed(runs: Runs, dataset: str) -> Run:
    """Return the run whose recipe and CLIP a dataset is analyzed with: the reference's if it uses the dataset."""
    users = [run for run in runs if run.dataset.name == dataset]
    return next((run for run in users if run.experiment == REFERENCE), users[0])


def export_settings(run: Run) -> ExportSettings:
    """Return the settings of an export of a run's pairs."""
    return ExportSettings(
        experiment=run.experiment,
        dataset=run.dataset.name,
        licenses=run.dataset.settings.licenses,
        image_root=run.dataset.images["pretrain"],
        recipes=RecipeContents(**read_recipes(run.config)),
    )


def challenge_settings(runs: Runs) -> dict:
    """Return the settings of the challenge's table: every seed of the experiments that the report compares.

    Each of their models is also listed before training.

    Raises:
        InputError: a benchmark's files are not configured, or an experiment is not valid.
    """
    runs.experiments.require(*runs.shared.report.experiments)
    reference, known = runs.shared.challenge.model_dump(), runs.shared.benchmarks.model_dump()
    scored = {name: known[name] for name in reference["scores"]}
    files = {f"{name}.{key}": file for name, keys in scored.items() for key, file in keys.items()}
    if missing := [f"benchmarks.{name}" for name, file in files.items() if file is None]:
        raise InputError(
            f"the challenge needs {', '.join(missing)}: name them in config/config.yaml "
            "(docs/evaluation.md says where to get the files)"
        )
    compared = [
        runs.get(name, seed) for name in runs.shared.report.experiments for seed in runs.experiments.configs[name].seeds
    ]
    before = {run.config.model.name: run for run in reversed(compared)}  # the first run of each model

    def describe(run: Run, experiment: str, seed: int | None, stage: str) -> dict:
        folders = {name: runs.stage_folder(run, f"{stage}/{name}") for name in scored}
        return {"experiment": experiment, "seed": seed, "benchmarks": folders}

    return reference | {
        "runs": [
            *(describe(run, f"{name} before training", None, "base_benchmarks") for name, run in before.items()),
            *(describe(run, run.experiment, run.seed, "benchmarks") for run in compared),
        ]
    }


def crate_settings(runs: Runs, page: str) -> dict:
    """Return the settings of the crate of a page's experiments; raises as `page_settings` does."""
    described = page_settings(runs, experiments_on(runs, page))["experiments"]
    models, datasets, captioners = [], {}, []
    for experiment in described:
        for seed in (run["seed"] for run in experiment["runs"]):
            run = runs.get(experiment["name"], seed)
            datasets[run.dataset.name] = {"settings": run.dataset.settings.file_content(), "images": run.dataset.images}
            model = run.config.model
            models += [(model.trained_parts or model).name, model.name]
            if run.captioner:
                captioners.append(_stages_before_captions(runs, run))
    return {
        "page": page,
        "experiments": described,
        "datasets": datasets,
        "models": [f"results/{kind}/{name}" for kind in ("foundation", "models") for name in dict.fromkeys(models)],
        "captioners": captioners,
        "foundations": {name: str(path) for name, path in runs.shipped_foundations.items() if name in models},
        "command_line": {key: value for key, value in runs.experiments.command_line.items() if key not in NOT_RECORDED},
    }


def _stages_before_captions(runs: Runs, run: Run) -> dict[str, str]:
    """Return the dataset of the captioner's run, and the folders of its stages up to the captioner."""
    captioner = runs.get(run.captioner, run.seed)
    stages = _stages(runs, captioner)
    last = list(stages).index(run.trained_by(captioner)) + 1
    return {
        "dataset": f"{RESULTS}/{captioner.dataset.name}",
        "stages": dict(list(stages.items())[:last]),
    }


def _stages(runs: Runs, run: Run) -> dict[str, str]:
    """Return the folders of the stages that a page shows; benchmarks have a page of their own."""
    tasks = runs.shared.evaluations
    shown_stages = [*STAGES, *(f"{prefix}{task}" for prefix in TASK_PREFIXES for task in tasks)]
    return {stage: runs.stage_folder(run, stage) for stage in shown_stages if stage in run.settings}
