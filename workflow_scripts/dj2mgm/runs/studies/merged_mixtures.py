"""Mixtures whose models are merged from LoRAs of single sources instead of trained: variants, settings and files."""

import random
from collections.abc import Mapping
from typing import Any

from dj2mgm.errors import InputError
from dj2mgm.records.mixture_records import MergedMixture, MergeSettings
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.studies.mixtures import compute_shares, list_quantile_keys
from dj2mgm.runs.studies.study_designs import list_single_source_changes, locate_study_file
from dj2mgm.settings.study_files import MixtureSpace, SampleDesign

MERGED_FOLDER = "merged"  # folder of the scores, below the study's results


def find_merging_design(runs: Runs, study: str) -> SampleDesign | None:
    """Return the design of a study that merges LoRAs; None for other studies."""
    runs.experiments.require(study)
    design = runs.experiments.sources[study].content.design
    return design if isinstance(design, SampleDesign) and design.merged else None


def build_merge_settings(runs: Runs, study: str) -> MergeSettings:
    """Return the sources whose LoRAs are merged, and the mixtures.

    Raises:
        InputError: the experiment trains no LoRA, or a source has pairs, not instructions.
    """
    design, experiment = find_merging_design(runs, study), runs.experiments.sources[study].experiment
    file, dataset = locate_study_file(study), runs.first_seed(experiment).dataset
    if runs.experiments.configs[experiment].finetune.lora is None:
        raise InputError(f"{file}: design.merged: {experiment} trains no LoRA; set finetune.lora, or remove `merged`")
    if any(dataset.settings.sources[source].split != "finetune" for source in design.mixture.sources):
        raise InputError(f"{file}: design.merged: the sources must have instructions, not pairs; remove `merged`")
    singles = list_single_source_changes(design.mixture)
    folders = {
        source: runs.find_stage_folder(runs.first_seed(_find_variant(runs, experiment, label)), "finetune")
        for source, label in zip(design.mixture.sources, singles, strict=True)
    }
    variants = runs.experiments.variants
    changes = {name: variants[name].settings for name in runs.experiments.variant_names[study]}
    trained = {name: _read_shares(design.mixture, values) for name, values in changes.items() if values}
    single_shares = [_read_shares(design.mixture, values) for values in singles.values()]
    mixtures = [
        MergedMixture(shares=shares, variant=name) for name, shares in trained.items() if shares not in single_shares
    ]
    drawn = draw_mixtures(design.mixture, design.merged, design.seed)
    mixtures += [MergedMixture(shares=shares) for shares in drawn if shares not in trained.values()]
    return MergeSettings(sources=folders, mixtures=mixtures)


def _find_variant(runs: Runs, experiment: str, label: str) -> str:
    """Return the variant with a label; the experiment itself if the variant changes nothing."""
    variant = f"{experiment}-{label}"
    return variant if variant in runs.experiments.configs else experiment


def _read_shares(mixture: MixtureSpace, changes: Mapping[str, Any]) -> dict[str, float]:
    return {source: changes[f"shares.{source}"] for source in mixture.sources}


def draw_mixtures(mixture: MixtureSpace, count: int, seed: int) -> list[dict[str, float]]:
    """Return the shares of at most `count` different random mixtures; all mixtures are equally likely."""
    numbers, keys = random.Random(f"{seed} merged"), list_quantile_keys(mixture)
    draws = [tuple(compute_shares(mixture, {key: numbers.random() for key in keys}).values()) for _ in range(count)]
    return [dict(zip(mixture.sources, shares, strict=True)) for shares in dict.fromkeys(draws)]


def locate_scores_file(runs: Runs, study: str) -> str | None:
    """Return the file with the scores of merged models; None if the study merges none."""
    return (
        f"results/{runs.results_prefix}{study}/{MERGED_FOLDER}/scores.yaml"
        if find_merging_design(runs, study)
        else None
    )
