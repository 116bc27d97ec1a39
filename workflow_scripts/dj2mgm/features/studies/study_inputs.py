"""Inputs of a study's page and of its merged mixtures: experiments, settings and files."""

from collections.abc import Mapping
from typing import Any

from dj2mgm.errors import InputError
from dj2mgm.features.studies.changes import read_setting
from dj2mgm.features.studies.designs import SampleDesign
from dj2mgm.features.studies.mixtures import MixtureSpace, draw_mixtures, list_single_source_changes
from dj2mgm.features.studies.search_batches import find_study, has_diverged, show_search
from dj2mgm.features.studies.searches import list_full_trials, read_planned_batches
from dj2mgm.features.studies.study_records import MergedMixture, MergeSettings
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.pages import build_page_settings


def list_study_experiments(runs: Runs, study: str) -> list[str]:
    """Return the experiments on a study's page, beginning with the one that others are compared with.

    Raises:
        InputError: the study is not valid.
    """
    source = find_study(runs, study)
    names, reference = [source.experiment, *runs.experiments.variant_names[study]], source.content.page.reference
    if reference and source.name_variant(reference) in names:
        names.insert(0, source.name_variant(reference))
    if source.search:
        trained = {name for record in read_planned_batches(source.search) for name in record.names}
        shown_names = {name for name in list_full_trials(source.search) if not has_diverged(runs, name)}
        names = [name for name in names if name not in trained or name in shown_names]
    return list(dict.fromkeys(names))


def build_study_settings(runs: Runs, study: str) -> dict:
    """Return the settings of a study's page."""
    names, variants = list_study_experiments(runs, study), runs.experiments.variants
    settings = build_page_settings(runs, names)
    keys = dict.fromkeys(key for name in names if name in variants for key in variants[name].settings)
    for experiment in settings["experiments"]:
        config = runs.experiments.configs[experiment["name"]]
        if "control" not in experiment:
            experiment["changes"] = {key: read_setting(config, experiment["recipes"], key) for key in keys}
    shown = find_study(runs, study).content.model_dump(include={"experiment", "description", "page"})
    shown["merged"] = locate_scores_file(runs, study)
    if search := show_search(runs, study):
        shown["search"] = search.model_dump()
    return settings | {"study": shown}


def find_merging_design(runs: Runs, study: str) -> SampleDesign | None:
    """Return the design of a study that merges LoRAs; None for other studies."""
    design = find_study(runs, study).content.design
    return design if isinstance(design, SampleDesign) and design.merged else None


def build_merge_settings(runs: Runs, study: str) -> MergeSettings:
    """Return the sources whose LoRAs are merged, and the mixtures.

    Raises:
        InputError: the experiment trains no LoRA, or a source has pairs, not instructions.
    """
    design, merging = find_merging_design(runs, study), find_study(runs, study)
    file, experiment = merging.file, merging.experiment
    dataset = runs.first_seed(experiment).dataset
    if runs.experiments.configs[experiment].finetune.lora is None:
        raise InputError(f"{file}: design.merged: {experiment} trains no LoRA; set finetune.lora, or remove `merged`")
    if any(dataset.settings.sources[source].split != "finetune" for source in design.mixture.sources):
        raise InputError(f"{file}: design.merged: the sources must have instructions, not pairs; remove `merged`")
    singles = list_single_source_changes(design.mixture)
    trained_names = map(merging.name_variant, singles)
    own_names = [name if name in runs.experiments.configs else experiment for name in trained_names]  # no change
    folders = {
        source: runs.find_stage_folder(runs.first_seed(name), "finetune")
        for source, name in zip(design.mixture.sources, own_names, strict=True)
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


def _read_shares(mixture: MixtureSpace, changes: Mapping[str, Any]) -> dict[str, float]:
    return {source: changes[f"shares.{source}"] for source in mixture.sources}


def locate_scores_file(runs: Runs, study: str) -> str | None:
    """Return the file with the scores of merged models; None if the study merges none."""
    file = f"results/{runs.results_prefix}{study}/merged/scores.yaml"
    return file if find_merging_design(runs, study) else None
