"""What pages that compare experiments, and crates of them, are made from."""

from pathlib import Path

from dj2mgm.config.leaks import leaks_of
from dj2mgm.config.recipes import read_recipes
from dj2mgm.config.runs import REFERENCE, Run, Runs
from dj2mgm.config.stages import LEAKS, STAGES
from dj2mgm.errors import InputError

NOT_RECORDED = ("crate", "crate_folders", "overwrite")  # keys of one command, not of the run


def page_of(runs: Runs, experiment: str) -> str:
    """Where an experiment is reported, below results/: with all that are compared if it is one of them, else beside
    the reference."""
    compared = experiment in runs.compared and experiment != REFERENCE
    return f"{runs.place}report" if compared else f"{runs.place}{experiment}/report"


def experiments_on(runs: Runs, page: str) -> list[str]:
    """The experiments of a page, the one that the others are compared with first."""
    own = page.removeprefix(runs.place)
    return runs.compared if own == "report" else list(dict.fromkeys([REFERENCE, str(Path(own).parent)]))


def page_settings(runs: Runs, experiments: list[str]) -> dict:
    """What a page that compares experiments is made from; the reference has the seeds of all that are compared.

    Raises:
        InputError: one of them is not valid.
    """
    runs.require(*experiments)
    seeds = [seed for name in experiments for seed in runs.configs[name]["seeds"]]
    described = []
    for name in experiments:
        asked = runs.configs[name]["seeds"] if name != experiments[0] else list(dict.fromkeys(seeds))
        own = [runs.of(name, seed) for seed in asked]
        config = {key: value for key, value in own[0].config.items() if key not in ("seed", "description", "overwrite")}
        described.append(
            {
                "name": name,
                "description": runs.configs[name]["description"],
                "dataset": f"results/datasets/{own[0].dataset['name']}",
                "leaks": leaks_of(own[0].dataset),
                "licenses": own[0].dataset["licenses"],
                "config": config,
                "recipes": read_recipes(runs.configs[name]),
                "runs": [{"seed": run.seed, "stages": _stages(runs, run)} for run in own],
            }
        )
    return {"experiments": described}


def page_files(runs: Runs, experiments: list[str]) -> list[str]:
    """All files that a page of these experiments reads; raises as `page_settings` does."""
    files = set()
    for experiment in page_settings(runs, experiments)["experiments"]:
        files |= {f"{experiment['dataset']}/{name}" for name in ("summary.json", "evaluation.jsonl")}
        files |= {f"{experiment['leaks']}/{name}" for name in LEAKS if experiment["leaks"]}
        for run in experiment["runs"]:
            for stage, folder in run["stages"].items():
                files |= {f"{folder}/{name}" for name in runs.stages[stage].outputs}
    return sorted(files)


def challenge_settings(runs: Runs) -> dict:
    """What the challenge's table is made from: every seed of the experiments that the page compares.

    Raises:
        InputError: a benchmark's files are not configured, or an experiment is not valid.
    """
    runs.require(*runs.compared)
    scored = {name: runs.benchmarks[name] for name in runs.reference_scores["scores"]}
    files = {f"{name}.{key}": file for name, keys in scored.items() for key, file in keys.items()}
    if missing := [f"benchmarks.{name}" for name, file in files.items() if file is None]:
        raise InputError(
            f"the challenge needs {', '.join(missing)}: name them in config/config.yaml "
            "(docs/evaluation.md says where to get the files)"
        )
    compared = [runs.of(name, seed) for name in runs.compared for seed in runs.configs[name]["seeds"]]
    return runs.reference_scores | {
        "runs": [
            {
                "experiment": run.experiment,
                "seed": run.seed,
                "benchmarks": {name: runs.stage(run, f"benchmarks/{name}") for name in scored},
            }
            for run in compared
        ]
    }


def crate_settings(runs: Runs, page: str) -> dict:
    """What the crate of a page's experiments is made from; raises as `page_settings` does."""
    described = page_settings(runs, experiments_on(runs, page))["experiments"]
    models, datasets, captioners = {}, {}, []
    for experiment in described:
        for seed in (run["seed"] for run in experiment["runs"]):
            run = runs.of(experiment["name"], seed)
            datasets[run.dataset["name"]] = {key: run.dataset[key] for key in ("settings", "images")}
            models |= {model["name"]: model for model in (_made_of(run.config["model"]), run.config["model"])}
            if run.captioner:
                captioners.append(_stages_before_captions(runs, run))
    return {
        "page": page,
        "experiments": described,
        "datasets": datasets,
        "models": [f"results/{kind}/{name}" for kind in ("foundation", "models") for name in models],
        "captioners": captioners,
        "foundations": {name: str(path) for name, path in runs.shipped_foundations.items() if name in models},
        "command_line": {key: value for key, value in runs.command_line.items() if key not in NOT_RECORDED},
    }


def _stages_before_captions(runs: Runs, run: Run) -> dict[str, str]:
    """The dataset, and the folders of the stages that made the model which writes captions for a run."""
    captioner = runs.of(run.captioner, run.seed)
    stages = _stages(runs, captioner)
    last = list(stages).index(captioner.trains[0]) + 1
    return {
        "dataset": f"results/datasets/{captioner.dataset['name']}",
        "stages": dict(list(stages.items())[:last]),
    }


def _stages(runs: Runs, run: Run) -> dict[str, str]:
    """Of a page: without benchmarks, which are on a page of their own."""
    shown = [*STAGES, *(f"evaluations/{task}" for task in runs.tasks)]
    return {stage: runs.stage(run, stage) for stage in shown if stage in run.settings}


def _made_of(model: dict) -> dict:
    """The model whose parts a tiny one is made of; otherwise the model itself."""
    foundation = model.get("foundation", {})
    return foundation if "name" in foundation else model
