"""Settings of exports."""

from dj2mgm.records.publication_records import ExportSettings, RecipeContents
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.run import Run


def build_export_settings(run: Run) -> ExportSettings:
    """Return the settings of an export of a run's pairs."""
    return ExportSettings(
        experiment=run.experiment,
        dataset=run.dataset.name,
        licenses=run.dataset.settings.licenses,
        image_root=run.dataset.images["pretrain"],
        recipes=RecipeContents(**read_recipes(run.config)),
    )
