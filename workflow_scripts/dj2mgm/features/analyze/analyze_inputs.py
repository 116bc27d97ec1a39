"""Settings of a dataset's analysis, from the run that uses it."""

from dj2mgm.features.analyze.analyze_keys import AnalysisSettings
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.stage_settings import build_recipe_values
from dj2mgm.runs.stages import Run
from dj2mgm.settings.configuration import drop_defaults


def build_analysis_settings(run: Run) -> AnalysisSettings:
    """Return the settings of the analysis of a run's dataset with its filter recipe."""
    config = run.config
    chosen = {"dataset": config.dataset, "model": config.model.name, "recipe": config.recipe}
    return AnalysisSettings.from_sections(
        config.filter,
        **build_recipe_values(config, run.dataset.images, read_recipes(config)["filter"]),
        clip=config.model.clip,
        cpu_threads=config.cpu_threads,
        chosen=drop_defaults(chosen),
    )
