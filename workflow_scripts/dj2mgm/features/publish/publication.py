"""Settings of exports and publications: a run's pairs and model with their cards, and the files that the cards cite."""

from collections.abc import Iterable
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.errors import InputError
from dj2mgm.features.publish.publish_settings import ExportSettings, PublishSettings, check_licenses
from dj2mgm.features.publish.run_record import refuse_unlearned
from dj2mgm.records import VERDICT_FILE, RecipeContents
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.command_messages import PlannedJob, ReadingTarget
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.pages import locate_page_folder
from dj2mgm.runs.stages import Run
from dj2mgm.settings.string_formats import has_format

READING_TARGETS = {
    "publish": ReadingTarget(r"results/published/(.+)/(?:model|dataset)(?:\.pushed\.json|/README\.md)"),
    "export": ReadingTarget(r"results/(.+)/export/[^/]+/README\.md", selects_rows=True),
}


def check_learned(runs: Runs, targets: Iterable[PlannedJob]) -> None:
    """Refuse models that have learned nothing according to their page; publishing makes and checks a missing page."""
    for folder in filter(None, map(READING_TARGETS["publish"].find_folder, targets)):
        experiment = runs.by_folder(folder).experiment
        verdict = Path("results", locate_page_folder(runs, experiment), VERDICT_FILE)
        if verdict.is_file():
            refuse_unlearned(experiment, verdict, runs.shared.publish.allow_unlearned)


def build_export_settings(run: Run) -> ExportSettings:
    """Return the settings of an export of a run's pairs."""
    return ExportSettings(
        experiment=run.experiment,
        dataset=run.dataset.name,
        licenses=run.dataset.settings.licenses,
        image_root=run.dataset.images["pretrain"],
        recipes=RecipeContents(**read_recipes(run.config)),
    )


def build_publish_settings(runs: Runs, run: Run) -> PublishSettings:
    """Return the settings of model, dataset and cards.

    Raises:
        InputError: a license is not stated, or there is no adapter that others could load.
    """
    model, weights = run.config.model, runs.shared.publish.weights
    check_licenses(run.dataset.name, run.dataset.settings)
    file = f"config/models/{model.name if has_format('name', model.name) else '<name>'}.yaml"
    if not model.license:
        raise InputError(
            f"publish: {model.name} has no license, and nothing is published without one; state license in {file}, "
            "as its base models and data allow, which repeats no training"
        )
    bases = model.hub_ids
    if weights == "adapter" and not run.config.finetune.lora:
        raise InputError(f"publish.weights: {run.experiment} trains no adapter (lora: null); choose merged")
    # the language model of an MGM
    adapter_base = bases[0] if bases and not (model.is_mgm and model.whole_model) else None
    if weights == "adapter" and not adapter_base:
        raise InputError(
            f"publish.weights: an adapter needs a base model that other libraries load from the hub, and {file} names "
            "none; state hub_ids there, or choose merged"
        )
    evaluate = run.config.evaluate
    return PublishSettings(
        experiment=run.experiment,
        seed=run.seed,
        dataset=run.dataset.name,
        licenses=run.dataset.settings.licenses,
        model=model.name,
        license=model.license,
        base_models=bases,
        adapter_base=adapter_base,
        mgm=model.is_mgm,
        trained_by_workflow=model.trained_by_workflow,
        weights=weights,
        allow_unlearned=runs.shared.publish.allow_unlearned,
        question=evaluate.caption_question,
        max_new_tokens=evaluate.max_new_tokens,
        recipes=RecipeContents(**read_recipes(run.config)),
        records=list_records(runs, run),
    )


def list_records(runs: Runs, run: Run) -> dict[str, str]:
    """Return the files whose figures the cards state, by their names next to the cards."""
    page = f"results/{locate_page_folder(runs, run.experiment)}"
    records = {
        "dataset/summary.json": f"{DATASETS_FOLDER}/{run.dataset.name}/summary.json",
        "comparison.csv": f"{page}/comparison.csv",
        VERDICT_FILE: f"{page}/{VERDICT_FILE}",
    }
    for stage in ("filter", "synthesize", "jsonl", *run.training_stages):
        names = ("metrics.json", "config.yaml") if stage in run.training_stages else ("summary.json",)
        if stage in run.settings:
            records |= {f"{stage}/{name}": f"{runs.find_stage_folder(run, stage)}/{name}" for name in names}
    return records
