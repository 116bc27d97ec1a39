"""All runs, each an experiment with one seed, and the folders of their results.

The first seed has its results in results/<dataset>/<model>/<experiment>/, other seeds in seed-<n>/ below it. Results of
another dataset or model are therefore never replaced. Datasets, their checks, analyses and near-duplicates, captions
and models are in folders of their own, which runs share.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from dj2mgm.dataset_resolution.experiment_dataset import (
    Dataset,
    check_shares,
    resolve_amounts,
    resolve_dataset,
)
from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import find_shipped_foundation
from dj2mgm.runs.experiment_recipes import check_without_instructions
from dj2mgm.runs.experiments import MINIMAL_TARGET, REFERENCE, Experiments, Variant, VariantSource
from dj2mgm.runs.stages import STAGES, Reuse, Run, Stage, list_feature_stages
from dj2mgm.settings.base import StageSettings
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.models import ModelFile

MAX_RUNS = 5000  # limits the time of a start, at which Snakemake resolves all runs
SEED_FOLDER = re.compile(r"seed-(\d+)")


class Runs:
    """All runs, with their folders and stages.

    Attributes:
        experiments: merged configurations.
        shared: the configuration for the keys of several experiments.
        results_prefix: folder of pages, below results/, with its slash: <dataset>/<model>/ of the reference.
        stages: all stages by name, with those of features.
        reuse: finds the owners of shared stages.
    """

    def __init__(self, command_line: dict, sources: Iterable[VariantSource] = ()):
        """Resolve every run of every experiment.

        Args:
            command_line: values of --config.
            sources: sources of further variants.

        Raises:
            InputError: config.yaml, the command line or the reference is not valid. Errors of other experiments are in
                `experiments.errors`.
        """
        self.experiments = Experiments(command_line, sources)
        self.shared = self.experiments.shared
        self.stages: dict[str, Stage] = STAGES | list_feature_stages(self.shared)
        self.reuse = Reuse(self.experiments, self.stages, self.get)
        self._datasets: dict[str, Dataset] = {}  # by name, filled when a run first needs one
        self._runs: dict[tuple[str, int], Run] = {}
        self._checked_targets: set[str] = set()
        checks = (self._check_dataset_name, self._check_captioner, self._check_size)
        for step in (self.experiments.add_experiment, *checks):
            self._check_number()
            for name in self.experiments.files:
                if name not in self.experiments.errors:
                    self._attempt(name, step, name)
        for source in self.experiments.sources.values():
            self._attempt(source.name, source.read, self.experiments)
        for target in (*self.experiments.sources, MINIMAL_TARGET):
            self._add_variants(target)
        for name in self.experiments.names:
            self._attempt(name, self._read_variants, name)

    def __iter__(self) -> Iterator[Run]:
        """Iterate over every run that a configuration names or that was requested before.

        Seeds after the first are resolved when they are needed: experiments may have a thousand.
        """
        return (self.get(name, seed) for name, seed in self._list_names())

    def iterate_with_results(self) -> Iterator[Run]:
        """Iterate over the runs that have a folder of results."""
        for name, seed in self._list_names():
            parent = Path("results", self.first_seed(name).folder).parent  # of all seeds, which are not resolved for it
            if (parent / self._name_run(name, seed)).is_dir():
                yield self.get(name, seed)

    def _list_names(self) -> list[tuple[str, int]]:
        """Return experiment and seed of every run; `decide` requests seeds that no configuration names."""
        configs = self.experiments.configs.items()
        return list(dict.fromkeys([*((name, seed) for name, config in configs for seed in config.seeds), *self._runs]))

    def _name_run(self, experiment: str, seed: int) -> str:
        is_first_seed = seed == self.experiments.configs[experiment].seeds[0]
        return experiment if is_first_seed else f"{experiment}/seed-{seed}"

    def get(self, experiment: str, seed: int) -> Run:
        """Return the run of an experiment with a seed."""
        if (experiment, seed) not in self._runs:
            if experiment not in self.experiments.configs:
                self._find_late_variant(experiment)
            try:
                config, dataset, settings = self._resolve_settings(self.experiments.configs[experiment], seed)
            except InputError as error:
                origin = "" if experiment == REFERENCE else f"experiment {experiment}: "  # the reference is not chosen
                raise error.with_origin(origin) from None
            name = self._name_run(experiment, seed)
            self._runs[experiment, seed] = Run(experiment, seed, name, config, dataset, settings)
        return self._runs[experiment, seed]

    def _resolve_settings(self, config: Experiment, seed: int) -> tuple[Experiment, Dataset, dict[str, StageSettings]]:
        """Return a configuration with a seed and the sources' amounts, its dataset, and the settings of its stages."""
        if config.dataset not in self._datasets:  # listing a dataset's files is slow
            self._datasets[config.dataset] = resolve_dataset(config.dataset)
        dataset = self._datasets[config.dataset]
        sources = resolve_amounts(dataset, config.sources)
        check_shares(dataset, config.shares, config.sources)
        if isinstance(config.jsonl.fraction, dict):
            resolve_amounts(dataset, config.jsonl.fraction)
        config = config.model_copy(update={"seed": seed, "sources": sources})
        settings = {name: stage.settings(config, dataset.images) for name, stage in self.stages.items()}
        if not dataset.settings.has_instructions:
            check_without_instructions(dataset.name, settings["synthesize"])
        return config, dataset, {stage: values for stage, values in settings.items() if values is not None}

    def first_seed(self, experiment: str) -> Run:
        """Return the run of an experiment with its first seed."""
        if experiment not in self.experiments.configs:
            self._find_late_variant(experiment)
        return self.get(experiment, self.experiments.configs[experiment].seeds[0])

    def by_folder(self, folder: str) -> Run:
        """Return the run whose results are in results/<folder>.

        Raises:
            InputError: the folder belongs to another dataset or model than those of this command.
        """
        *parents, name = folder.split("/")
        seed = SEED_FOLDER.fullmatch(name)
        if seed and (name not in self.experiments.configs or parents[-1] in self.experiments.configs):
            run = self.get(parents[-1], int(seed[1]))
        else:
            run = self.first_seed(name)
        if folder != run.folder:
            raise InputError(
                f"results/{folder}: with these settings, the results of {run.name} are in results/{run.folder}. Add "
                "the `--config` with which this folder was made"
            )
        return run

    def find_analyzed(self, dataset: str) -> Run:
        """Return the run whose recipe and CLIP analyze a dataset: the requested experiment's if it uses the dataset."""
        users = [run for run in self if run.dataset.name == dataset]
        experiment = self.experiments.get_requested("analyze", REFERENCE)
        return next((run for run in users if run.experiment == experiment), users[0])

    def find_stage_folder(self, run: Run, stage: str) -> str:
        """Return the folder of a stage's output, which is another run's if they share the stage."""
        return f"results/{self.reuse.find_owner(run, stage).folder}/{stage}"

    def locate_output(self, run: Run, stage: str, name: str) -> str:
        """Return the path of a file of a stage's output."""
        return f"{self.find_stage_folder(run, stage)}/{name}"

    def find_captioner_folder(self, run: Run) -> str | None:
        """Return the folder of the trained stage that writes captions for a run.

        None if no model of this workflow writes them.
        """
        if not run.captioner:
            return None
        captioner = self.get(run.captioner, run.seed)
        return self.find_stage_folder(captioner, run.choose_training_stage(captioner))

    @property
    def results_prefix(self) -> str:
        return self.experiments.results_prefix

    @property
    def datasets(self) -> dict[str, Dataset]:
        return {run.dataset.name: run.dataset for run in self._runs.values()}

    @property
    def models(self) -> dict[str, ModelFile]:
        """Models by name, including those that provide the parts of others."""
        models = [run.config.model for run in self._runs.values()]
        models += [model.trained_parts for model in models if model.trained_parts]
        return {model.name: model for model in models}

    @cached_property
    def shipped_foundations(self) -> dict[str, Path]:
        """Folders of trained parts that come with the workflow, by model; none if they are trained here."""
        folders = {name: find_shipped_foundation(model) for name, model in self.models.items()}
        are_used = self.shared.foundation == "shipped"
        return {name: folder for name, folder in folders.items() if folder and are_used}

    @property
    def nodes(self) -> int:
        """Number of nodes of training.

        Raises:
            InputError: the experiments state different numbers, while rules need one for all.
        """
        numbers = {run.config.nodes for run in self._runs.values()}
        if len(numbers) > 1:
            raise InputError("experiments state different numbers of `nodes`; run them one after another")
        return numbers.pop()

    def require_target(self, name: str) -> None:
        """Raise the InputError of a target that cannot run, or of a variant that it may plan later.

        Later variants are checked when their target is requested, so that other targets start without delay.
        """
        self.experiments.require(name)
        if (source := self.experiments.sources.get(name)) and name not in self._checked_targets:
            for variant, config in source.list_late_checks(self.experiments):
                with _naming_point(variant):
                    self._resolve_settings(config, config.seeds[0])
            self._checked_targets.add(name)

    def add_late_variants(self, target: str) -> None:
        """Add the variants that a target has planned since it was read."""
        earlier_variants = set(self.experiments.variant_names[target])
        for variant in self.experiments.list_variants(target):
            if variant.name not in earlier_variants:
                self._add_variant(target, variant)

    def _find_late_variant(self, experiment: str) -> None:
        for source in self.experiments.sources.values():
            if source.late_names:
                self.add_late_variants(source.name)
        if experiment not in self.experiments.configs:
            raise InputError(f"results/{self.results_prefix}{experiment}: no target has planned this variant")

    def _check_number(self) -> None:
        number = sum(len(config.seeds) for config in self.experiments.configs.values())
        if number > MAX_RUNS:
            raise InputError(f"seeds: the experiments have {number} runs, but at most {MAX_RUNS} may exist; use fewer")

    def _attempt(self, target: str, step: Callable[..., None], *arguments: Any) -> None:
        if not self.experiments.attempt(target, step, *arguments):
            self._forget(target)

    def _forget(self, name: str) -> None:
        self.experiments.configs.pop(name, None)
        self._runs = {key: run for key, run in self._runs.items() if run.experiment != name}

    def _add_variants(self, target: str) -> None:
        variant_names = self.experiments.variant_names
        if target not in self.experiments.errors:
            self._attempt(target, self._read_variants, target)
        if target in self.experiments.errors:
            failed_variants = variant_names.pop(target, [])
            other_names = {name for names in variant_names.values() for name in names}
            for variant in failed_variants:
                if variant not in other_names:
                    self._forget(variant)
            variant_names[target] = [target]  # a request for its page then raises the target's error

    def _read_variants(self, target: str) -> None:
        self.experiments.variant_names.setdefault(target, [])
        for variant in self.experiments.list_variants(target):
            self._add_variant(target, variant)
        if source := self.experiments.sources.get(target):
            config = self.experiments.configs[source.experiment]
            source.check_dataset(self.first_seed(source.experiment).dataset, config)

    def _add_variant(self, target: str, variant: Variant) -> None:
        with _naming_point(variant):
            self.experiments.add_variant(target, variant)
            self._check_dataset_name(variant.name)
            self._check_captioner(variant.name)

    def _check_dataset_name(self, name: str) -> None:
        dataset = self.first_seed(name).dataset
        for run in self._runs.values():
            if run.dataset is dataset or run.dataset.name != dataset.name:
                continue
            if run.dataset.settings.file_content() != dataset.settings.file_content():
                raise InputError(
                    f"experiment {name}: {run.experiment} uses another dataset that is named {dataset.name}; "
                    "rename the folder of one"
                )

    def _check_size(self, name: str) -> None:
        """Check `jsonl.same_size_as` and `jsonl.fraction` of an experiment."""
        if name == REFERENCE and self.experiments.configs[name].jsonl.fraction != 1:
            raise InputError(
                f"jsonl.fraction: all experiments have shares of the samples of {REFERENCE}; state it in the file of "
                "another experiment"
            )
        counted_experiment, key = (
            self.experiments.configs[name].jsonl.same_size_as,
            f"experiment {name}: jsonl.same_size_as",
        )
        if counted_experiment is None:
            return
        self.experiments.check_experiments([counted_experiment], key)
        if counted_experiment in self.experiments.errors:
            raise InputError(f"{key}: {self.experiments.errors[counted_experiment]}")
        if self.experiments.configs[counted_experiment].jsonl.same_size_as or name == REFERENCE:
            raise InputError(f"{key}: name it in an experiment that is not {REFERENCE}, and one that uses all its rows")

    def _check_captioner(self, name: str) -> None:
        """Check the experiments whose trained models this experiment's captions depend on, directly or indirectly."""
        run, chain, key = self.first_seed(name), [name], f"experiment {name}: synthesize.mgm.experiment"
        while run.captioner:
            self.experiments.check_experiments([run.captioner], key)
            if run.captioner in self.experiments.errors:
                raise InputError(f"{key}: {self.experiments.errors[run.captioner]}")
            required_model, trained_model = run.config.model.name, self.experiments.configs[run.captioner].model.name
            if required_model != trained_model:
                raise InputError(
                    f"{key}: {run.captioner} trains {trained_model}, not {required_model}; name an experiment that "
                    f"trains {required_model}"
                )
            if run.captioner in chain:
                raise InputError(
                    f"synthesize.mgm.experiment: {' → '.join([*chain, run.captioner])} is a cycle; name an experiment "
                    "that is trained without these captions"
                )
            chain.append(run.captioner)
            run = self.first_seed(run.captioner)


@contextmanager
def _naming_point(variant: Variant) -> Iterator[None]:
    """Name the study's file and the changed keys in errors about one of its variants."""
    try:
        yield
    except InputError as error:
        if not variant.settings or variant.source in str(error):
            raise
        changes = ", ".join(f"{key}: {value}" for key, value in variant.settings.items())
        raise error.with_origin(f"{variant.source}: with {changes}: ") from None
