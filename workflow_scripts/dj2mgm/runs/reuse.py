"""Reuse: equal stages of different runs are run once, in the folder of one of them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from dj2mgm.runs.experiments import REFERENCE, Experiments
from dj2mgm.runs.stages import STAGE_NOTE, Run, Stage
from dj2mgm.storage.files import read_if_whole, write_yaml


class Reuse:
    """Search for the run that owns a stage's output."""

    def __init__(self, experiments: Experiments, stages: Mapping[str, Stage], get_run: Callable[[str, int], Run]):
        """Find owners among the runs of these experiments; `get_run` returns the run of an experiment with a seed."""
        self._experiments, self._stages, self._get_run = experiments, stages, get_run
        self._signatures: dict[tuple[str, int, str], str] = {}
        self._owners: dict[tuple[str, int, str], Run] = {}
        self._variants: dict[tuple[str, str, int, int], dict[str, list[Run]]] = {}
        self._shared: dict[tuple[str, str, int, str], Run] = {}
        self._begun: dict[Path, bool] = {}

    def find_owner(self, run: Run, stage: str) -> Run:
        """Return the run in whose folder a stage is run, for all runs with the same output of this stage.

        Outputs are the same if the stage's settings, dataset, model and captioner are the same, and also the outputs of
        the stages before it. The owner is the first of these that has the same output:

        1. the reference,
        2. the parent of the variant,
        3. the variant itself, if it has begun the stage, so that a new study does not run it again,
        4. another variant of the same parent; all variants that share the stage get the same owner.

        Owners are remembered, because results that appear during a run must not change them.
        """
        key = run.experiment, run.seed, stage
        if key not in self._owners:
            self._owners[key] = self._choose_owner(run, stage)
        return self._owners[key]

    def _choose_owner(self, run: Run, stage: str) -> Run:
        experiments, signature = self._experiments, self._find_signature(run, stage)
        variant = experiments.variants.get(run.experiment)
        parent = None if variant is None else variant.parent
        for name in (REFERENCE, parent or run.experiment):
            for candidate in self._find_runs(name, stage, run.seed):
                if self._find_signature(candidate, stage) == signature:
                    return candidate
        if parent is None or self._has_run(run, stage):
            return run
        key = parent, stage, run.seed, signature
        if key not in self._shared:
            candidates = self._group_variants(parent, stage, run.seed)[signature]
            self._shared[key] = next((run for run in candidates if self._has_run(run, stage)), candidates[0])
        return self._shared[key]

    def _has_run(self, run: Run, stage: str) -> bool:
        """Return whether a run had begun a stage with its present settings in its own folder.

        The answer of the first call is kept, because the run itself writes into the folder.
        """
        folder = Path("results", run.folder, stage)
        if folder not in self._begun:
            settings = {} if (folder / STAGE_NOTE).exists() else read_if_whole(folder / "config.yaml")
            settings.pop("labels", None)
            self._begun[folder] = settings == run.settings[stage].file_content()
        return self._begun[folder]

    def _find_runs(self, name: str, stage: str, seed: int) -> Iterator[Run]:
        """Yield the runs of an experiment with its first seed and with `seed`, if they have the stage."""
        if config := self._experiments.configs.get(name):
            for run_seed in dict.fromkeys((config.seeds[0], seed)):
                run = self._get_run(name, run_seed)
                if stage in run.settings:
                    yield run

    def _group_variants(self, parent: str, stage: str, seed: int) -> dict[str, list[Run]]:
        """Return the runs of a parent's variants by their signature of a stage, also of variants that a search adds."""
        variants = self._experiments.variants
        key = parent, stage, seed, len(variants)
        if key not in self._variants:
            runs_by_signature = self._variants[key] = {}
            for name in [variant.name for variant in variants.values() if variant.parent == parent]:
                for run in self._find_runs(name, stage, seed):
                    runs_by_signature.setdefault(self._find_signature(run, stage), []).append(run)
        return self._variants[key]

    def write_notes(self, runs: Iterable[Run]) -> None:
        """Write a stage.yaml for each stage that one of the runs shares, which names the owner's folder."""
        for run in runs:
            folder = Path("results", run.folder)
            for stage in run.settings:
                note, owner = folder / stage / STAGE_NOTE, self.find_owner(run, stage)
                if owner.folder == run.folder:
                    note.unlink(missing_ok=True)
                else:
                    write_yaml(note, {"same_as": f"results/{owner.folder}/{stage}"})

    def _find_signature(self, run: Run, stage: str) -> str:
        """Return the signature of a stage: equal for two runs if all inputs of the stage's output are equal."""
        key = run.experiment, run.seed, stage
        if key not in self._signatures:
            self._signatures[key] = self._sign(run, stage)
        return self._signatures[key]

    def _sign(self, run: Run, stage: str, pairs_only: bool = False) -> str:
        """Compute the signature of a stage; `pairs_only` leaves out everything that affects only instructions."""
        settings, definition = run.settings[stage], self._stages[stage]
        parts: dict = {"settings": settings.file_content()}
        if pairs_only and stage == "jsonl":
            parts["settings"] |= _find_pair_amounts(run)
        if definition.uses_dataset:
            parts["dataset"] = [run.dataset.name, run.dataset.settings.file_content()]
        if definition.uses_model(settings):
            parts["model"] = run.config.model.model_dump()
        if stage == "synthesize" and run.captioner:
            captioner = self._get_run(run.captioner, run.seed)
            parts["captioner"] = self._find_signature(captioner, run.choose_training_stage(captioner))
        if stage == "jsonl" and (other_experiment := run.config.jsonl.same_size_as):
            other_run = self._get_run(other_experiment, run.seed)
            if not pairs_only:
                parts["same_size_as"] = self._find_signature(other_run, stage)
            elif not other_run.selects_instructions:  # otherwise it does not affect the number of pairs
                parts["same_size_as"] = self._sign(other_run, stage, pairs_only=True)
        for upstream_stage in definition.upstream:
            if (
                upstream_stage not in run.settings
                or pairs_only
                and upstream_stage == "synthesize"
                and run.selects_instructions
            ):
                continue  # the pairs then come from the filter stage
            parts[upstream_stage] = (
                self._sign(run, upstream_stage, pairs_only=True)
                if pairs_only or definition.pairs_only
                else self._find_signature(run, upstream_stage)
            )
        return json.dumps(parts, sort_keys=True)


def _find_pair_amounts(run: Run) -> dict[str, dict[str, float]]:
    """Return the amounts and the shares of the sources that have pairs."""
    sources, amounts = getattr(run.dataset.settings, "sources", {}), {}
    for key, values in {"sources": run.config.sources, "shares": run.config.shares}.items():
        amounts[key] = {name: value for name, value in values.items() if sources[name].split == "pretrain"}
    return amounts
