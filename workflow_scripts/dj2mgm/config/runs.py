"""Runs: an experiment with one seed. Which there are, where their results lie, and which stages two of them share.

The first seed's results are in results/<experiment>/, those of others in results/<experiment>/seed-<n>/. With the
setting `results: <name>`, these folders are in results/<name>/.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dj2mgm.code import SCRIPTS
from dj2mgm.config.benchmarks import declarations
from dj2mgm.config.datasets import amounts_of, check_folder, resolve_dataset
from dj2mgm.config.evaluations import data_of
from dj2mgm.config.foundation import shipped_foundation
from dj2mgm.config.layers import (
    command_line_layer,
    experiment_file,
    experiment_names,
    merge_experiment,
    merge_shared_settings,
)
from dj2mgm.config.reading import suggestion
from dj2mgm.config.recipes import read_recipes
from dj2mgm.config.settings.strings import check_format
from dj2mgm.config.settings.validation import Layer
from dj2mgm.config.stages import (
    STAGE_NOTE,
    STAGES,
    TRAINING,
    Stage,
    analysis_settings,
    benchmark_stage,
    evaluation_stage,
)
from dj2mgm.config.variants import VARIANTS_OF
from dj2mgm.errors import InputError
from dj2mgm.files import write_yaml

MOST_RUNS = 5000  # of all experiments and seeds; each is resolved whenever Snakemake starts
REFERENCE = "baseline"  # what every experiment is compared with
FOLDER = re.compile(r"(?P<experiment>[^/]+?)(?:/seed-(?P<seed>\d+))?")


@dataclass(frozen=True)
class Run:
    experiment: str
    seed: int
    folder: str  # below results/
    config: dict  # merged; its `seed` is this run's
    dataset: dict  # name, settings, images (config/datasets.py)
    settings: dict[str, dict]  # by stage

    @property
    def trains(self) -> list[str]:
        """Its training stages."""
        return [stage for stage in TRAINING if stage in self.settings]

    @property
    def labels(self) -> dict[str, str | int]:
        """What trackers are told of it."""
        names = {"experiment": self.experiment, "seed": self.seed, "dataset": self.dataset["name"]}
        names |= {"model": self.config["model"]["name"], "recipe": self.config["recipe"]}
        captions = self.config["synthesize"]["recipe"]
        return names | ({"captions_recipe": captions} if captions else {})

    @property
    def captioner(self) -> str | None:
        """The experiment whose first trained model writes captions for this run."""
        captioner = self.settings["synthesize"]["captioner"] if "synthesize" in self.settings else None
        if captioner is None or captioner["name"] != "mgm":
            return None
        return self.config["synthesize"]["mgm"]["experiment"]


class Runs:
    """All experiments' merged configurations, and the runs they are made of."""

    def __init__(self, command_line: dict):
        """
        Raises:
            InputError: config.yaml, the command line or the reference is not valid, on which all experiments rest.
                A fault of another experiment is in `refused`, and is raised where that experiment is asked for.
        """
        across = merge_shared_settings(command_line)
        self.command_line = command_line_layer(command_line).values
        self.compared = across["report"]["experiments"]
        self.benchmarks, self.reference_scores = across["benchmarks"], across["challenge"]
        self.attention_benchmark = across["attention_benchmark"]
        self.foundation = across["foundation"]
        self.trusts_recipes = across["trusted_recipes"]
        self.folders_apart = across["decontaminate"]["folders"]
        self.export = across["export"] | {"format": across["format"]}
        self.publish = across["publish"]
        self.recorded, self.crate = across["provenance"]["experiment"], across["crate"]
        self.crate_folders: list[str] = across["crate_folders"]
        self.place = f"{across['results']}/" if across["results"] else ""  # of runs and pages, below results/
        self.overwrite = across["overwrite"]
        self.stages: dict[str, Stage] = STAGES | {
            f"benchmarks/{name}": benchmark_stage(name) for name in declarations()
        }
        self.tasks, self.evaluation_data = across["evaluations"], across["evaluation_data"]
        self.stages |= {f"evaluations/{task}": evaluation_stage(task) for task in self.tasks}
        self.configs: dict[str, dict] = {}
        self.parents: dict[str, str] = {}
        self.refused: dict[str, InputError] = {}  # by experiment or target
        self._datasets: dict[str, dict] = {}  # as they are resolved
        self._runs: dict[tuple[str, int], Run] = {}
        self._signatures: dict[tuple[str, int, str], str] = {}
        self.variants: dict[str, list[str]] = {}  # by target (config/variants.py)
        self.files = sorted(experiment_names(), key=lambda name: name != REFERENCE)  # it first: all rest on it
        self._check_known([REFERENCE], "config/experiments")
        self._check_known(self.compared, "report.experiments")
        self._check_known([self.export["experiment"]], "export.experiment")
        self._check_known([self.publish["experiment"]], "publish.experiment")
        self._check_known([self.recorded], "provenance.experiment")
        for target in VARIANTS_OF:
            self._check_known([across[target]["experiment"]], f"{target}.experiment")
        self._check_place(across["results"])
        for folder in self.folders_apart:
            check_folder("decontaminate.folders", folder)
        self._add_experiments(command_line)
        self._add_variants(across, command_line)
        self.names = sorted(name for name in self.files if name not in self.refused)
        self.experiments_by_page = {  # by target: the experiments on its page, first what the others are compared with
            "ablation": [across["ablation"]["experiment"], *self.variants["ablation"]],
            "lora_sweep": self.variants["lora_sweep"],
            "lora_vs_full": [*self.variants["lora_vs_full"], across["lora_vs_full"]["experiment"]],
        }

    def __iter__(self) -> Iterator[Run]:
        """Every run that a configuration names."""
        return iter(list(self._runs.values()))

    def of(self, experiment: str, seed: int) -> Run:
        if (experiment, seed) not in self._runs:
            config = self.configs[experiment] | {"seed": seed}
            folder = self.place + (experiment if seed == config["seeds"][0] else f"{experiment}/seed-{seed}")
            try:
                if config["dataset"] not in self._datasets:  # whose files are listed
                    self._datasets[config["dataset"]] = resolve_dataset(config["dataset"])
                dataset = self._datasets[config["dataset"]]
                config["sources"] = amounts_of(dataset, config["sources"])
                settings = {name: stage.settings(config, dataset["images"]) for name, stage in self.stages.items()}
            except InputError as error:
                raise type(error)(f"experiment {experiment}: {error}") from None
            settings = {stage: values for stage, values in settings.items() if values is not None}
            self._runs[experiment, seed] = Run(experiment, seed, folder, config, dataset, settings)
        return self._runs[experiment, seed]

    @property
    def datasets(self) -> dict[str, dict]:
        """Settings by name."""
        return {run.dataset["name"]: run.dataset["settings"] for run in self}

    @property
    def models(self) -> dict[str, dict]:
        """Model files' keys by name, and those of the models whose parts they are made of."""
        trained = [run.config["model"] for run in self]
        made_of = [model["foundation"] for model in trained if "name" in model.get("foundation", {})]
        return {model["name"]: model for model in (*trained, *made_of)}

    @cached_property
    def shipped_foundations(self) -> dict[str, Path]:
        """By model, the folder of the parts that come with the workflow; nothing if they are to be trained."""
        shipped = {name: shipped_foundation(model) for name, model in self.models.items()}
        return {name: folder for name, folder in shipped.items() if folder and self.foundation == "shipped"}

    @property
    def nodes(self) -> int:
        """On how many nodes training runs.

        Raises:
            InputError: not the same number in all experiments, while rules ask for it as a whole.
        """
        numbers = {run.config["nodes"] for run in self}
        if len(numbers) > 1:
            raise InputError("experiments state different numbers of `nodes`; run them one after another")
        return numbers.pop()

    def require(self, *targets: str) -> None:
        """
        Raises:
            InputError: one of these experiments, or targets of variants, is not valid.
        """
        for target in targets:
            if target in self.refused:
                raise self.refused[target]

    def at(self, folder: str) -> Run:
        """The run whose results are in results/<folder>."""
        match = FOLDER.fullmatch(folder.removeprefix(self.place))
        experiment, seed = match["experiment"], match["seed"]
        return self.of(experiment, int(seed)) if seed else self.first(experiment)

    def first(self, experiment: str) -> Run:
        """The run with the experiment's first seed."""
        return self.of(experiment, self.configs[experiment]["seeds"][0])

    def owner(self, run: Run, stage: str) -> Run:
        """The run in whose folder the stage's output is: the first of its relatives for whom it would be the same."""
        wanted = self._signature(run, stage)
        for experiment in (REFERENCE, self.parents.get(run.experiment), run.experiment):
            if experiment in self.configs:
                for seed in (self.configs[experiment]["seeds"][0], run.seed):
                    relative = self.of(experiment, seed)
                    if stage in relative.settings and self._signature(relative, stage) == wanted:
                        return relative
        return run

    def stage(self, run: Run, stage: str) -> str:
        """The folder of a stage's output."""
        return f"results/{self.owner(run, stage).folder}/{stage}"

    def captioner_stage(self, run: Run) -> str | None:
        """The folder of the trained stage that writes captions, the first of its run; None where the captioner is
        somebody else's model."""
        if not run.captioner:
            return None
        captioner = self.of(run.captioner, run.seed)
        return self.stage(captioner, captioner.trains[0])

    def evaluation_settings(self, task: str) -> dict:
        """
        Raises:
            InputError: there is no folder of the task's data.
        """
        return {"task": task, "data": str(data_of(task, self.evaluation_data))}

    def analyzed(self, dataset: str) -> Run:
        """The run whose recipe and CLIP a dataset is analyzed with: the reference's, if it uses the dataset."""
        runs = [run for run in self if run.dataset["name"] == dataset]
        return next((run for run in runs if run.experiment == REFERENCE), runs[0])

    def analysis_settings(self, dataset: str) -> dict:
        run = self.analyzed(dataset)
        return analysis_settings(run.config, run.dataset["images"])

    def export_settings(self, run: Run) -> dict:
        root = run.dataset["images"]["pretrain"]
        names = {"experiment": run.experiment, "dataset": run.dataset["name"], "licenses": run.dataset["licenses"]}
        return names | {"image_root": root, "recipes": read_recipes(run.config)}

    def plan_flags(self) -> list[str]:
        """The reference's settings of fine-tuning that decide about memory; sequences as long as it lets through."""
        config = self.first(REFERENCE).config
        finetune = config["finetune"]
        lora, batch = finetune["lora"], finetune["global_batch_size"]
        flags = [f"--model={config['model']['name']}", f"--sequence={finetune['max_length']}"]
        if lora:
            targets = [f"--lora-target={target}" for target in lora["targets"]]
            flags += [f"--lora-rank={lora['r']}", *targets]
        else:
            flags += ["--tuning=full"]
        if config["gpus"] > 1:
            flags += [f"--gpus={config['gpus']}", f"--nodes={config['nodes']}"]
        if finetune["compile"]:
            flags += ["--fused"]
        return flags + ([f"--global-batch={batch}"] if batch else [])

    def note_shared_stages(self) -> None:
        """In the folder of each run that has results: a stage.yaml for each stage that it shares, which says whose."""
        for run in self:
            folder = Path("results", run.folder)
            for stage in run.settings if folder.is_dir() else ():
                note, owner = folder / stage / STAGE_NOTE, self.owner(run, stage)
                if owner.folder == run.folder:
                    note.unlink(missing_ok=True)
                else:
                    write_yaml(note, {"same_as": f"results/{owner.folder}/{stage}"})

    def _signature(self, run: Run, stage: str) -> str:
        """Equal for two runs exactly if everything that a stage's output depends on is equal."""
        key = run.experiment, run.seed, stage
        if key not in self._signatures:
            self._signatures[key] = self._sign(run, stage)
        return self._signatures[key]

    def _sign(self, run: Run, stage: str) -> str:
        parts: dict = {"dataset": run.dataset, "settings": run.settings.get(stage)}
        if stage != "filter" or "clip" in run.settings["filter"]:
            parts["model"] = run.config["model"]
        if stage == "synthesize" and run.captioner:
            captioner = self.of(run.captioner, run.seed)
            parts["captioner"] = self._signature(captioner, captioner.trains[0])
        for before in self.stages[stage].upstream:
            if before in run.settings:
                parts[before] = self._signature(run, before)
        return json.dumps(parts, sort_keys=True)

    def _add_experiments(self, command_line: dict) -> None:
        for step in (self._read, self._resolve, self._check_captioner):
            if (number := sum(len(config["seeds"]) for config in self.configs.values())) > MOST_RUNS:
                raise InputError(f"seeds: the experiments have {number} runs, and may have {MOST_RUNS}; use fewer")
            for name in self.files:
                if name not in self.refused:
                    self._attempt(name, step, name, command_line)

    def _add_variants(self, across: dict, command_line: dict) -> None:
        for target in VARIANTS_OF:
            self.variants[target] = []
            self._attempt(target, self._add_variants_of, target, across[target], command_line)
            if target in self.refused:
                for variant in self.variants[target]:
                    self._forget(variant)
                self.variants[target] = [target]  # in their place: whoever asks for a page of it is told why not

    def _attempt(self, target: str, step: Callable[..., None], *arguments: Any) -> None:
        """A fault is kept for whoever asks for the target; one of the reference is everybody's."""
        try:
            step(*arguments)
        except InputError as error:
            if target == REFERENCE:
                raise
            self.refused.setdefault(target, error)
            self._forget(target)

    def _forget(self, name: str) -> None:
        self.configs.pop(name, None)
        self._runs = {key: run for key, run in self._runs.items() if run.experiment != name}

    def _read(self, name: str, command_line: dict) -> None:
        path = experiment_file(name)
        check_format(f"{path}: an experiment's file", "name", name)
        if name.lower() in reserved_names():
            raise InputError(
                f"{path}: {name} is a rule, or a folder of results, of the workflow; rename the experiment"
            )
        if twin := next((other for other in self.configs if other.lower() == name.lower()), None):
            raise InputError(f"{path}: some file systems cannot tell {name} and {twin} apart; rename one")
        self.configs[name] = merge_experiment(name, command_line)

    def _resolve(self, name: str, _: dict) -> None:
        for seed in self.configs[name]["seeds"]:
            dataset = self.of(name, seed).dataset
        for other in self:
            if other.dataset["name"] == dataset["name"] and other.dataset["settings"] != dataset["settings"]:
                raise InputError(
                    f"experiment {name}: {other.experiment} uses another dataset that is named {dataset['name']}; "
                    "rename the folder of one"
                )

    def _add_variants_of(self, target: str, settings: dict, command_line: dict) -> None:
        parent = settings["experiment"]
        self.require(parent)
        for variant in VARIANTS_OF[target](settings, self.configs[parent]):
            name = variant.name
            if name in self.files:
                raise InputError(f"{experiment_file(name)}: {variant.source} uses this name; rename the experiment")
            self.variants[target].append(name)
            self.parents[name] = parent
            self.configs[name] = merge_experiment(parent, command_line, Layer(variant.source, variant.changes))
            self._resolve(name, command_line)
            self._check_captioner(name, command_line)

    def _check_place(self, name: str | None) -> None:
        """Refuse a folder for results that other results lie in."""
        if name and name.lower() in {*reserved_names(), *(file.lower() for file in self.files)}:
            raise InputError(f"results: results/{name} is in use by the workflow or an experiment; choose another name")

    def _check_known(self, names: list[str], key: str) -> None:
        for name in names:
            if name not in self.files:
                raise InputError(f"{key}: there is no experiment {name!r}; {suggestion(name, self.files)}")

    def _check_captioner(self, name: str, _: dict) -> None:
        """Every experiment on the way from captions to the model that writes them."""
        run, chain, key = self.first(name), [name], f"experiment {name}: synthesize.mgm.experiment"
        while run.captioner:
            self._check_known([run.captioner], key)
            if run.captioner in self.refused:
                raise InputError(f"{key}: {self.refused[run.captioner]}")
            models = run.config["model"]["name"], self.configs[run.captioner]["model"]["name"]
            if models[0] != models[1]:
                raise InputError(
                    f"{key}: {run.captioner} trains {models[1]}, not {models[0]}; name an experiment that trains "
                    f"{models[0]}"
                )
            if run.captioner in chain:
                raise InputError(
                    f"synthesize.mgm.experiment: {' → '.join([*chain, run.captioner])} is a cycle; name an experiment "
                    "that is trained without these captions"
                )
            chain.append(run.captioner)
            run = self.first(run.captioner)


@cache
def reserved_names() -> frozenset[str]:
    """In small letters: names of rules, and of the folders that they, captioners and the page have in results/."""
    project = SCRIPTS.parent
    texts = [path.read_text(encoding="utf-8") for path in (project / "Snakefile", *(project / "rules").glob("*.smk"))]
    pairs = [
        name
        for text in texts
        for name in re.findall(r'^(?:use )?rule (?:\w+ as )?(\w+)|^    "(\w+)": \(|results/(\w+)', text, re.M)
    ]
    return frozenset({"captions", "report", *(name.lower() for pair in pairs for name in pair if name)})
