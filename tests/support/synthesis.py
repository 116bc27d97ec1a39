"""Settings, runs and commands of the synthesize stage on a project of `data/` and `clip/`."""

from pathlib import Path

from dj2mgm.juicer.recipe_settings import CaptionerModel, RecipeSettings, prepare_synthesis
from dj2mgm.juicer.run_recipe import SYNTHESIZED, run_recipe
from dj2mgm.settings.data import SynthesizeSettings
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml
from forked_python import forked_python
from paths import PROJECT

OUTPUTS = ("synthesized.jsonl", "stats.jsonl", "dropped.jsonl")


def build_synthesis_settings(project: Path, folder: Path, process: list[dict], captioner: dict) -> dict:
    return {
        "image_root": str(project / "data"),
        "processes": 1,
        "recipe": {"process": process},
        "seed": 0,
        "cpu_threads": 1,
        "gpus": 1,
        "clip": str(project / "clip"),
        "captioner": captioner,
        "captions": str(folder / "captions"),
    }


def read_synthesize_settings(path: Path, output_dir: Path, model: CaptionerModel | None) -> RecipeSettings:
    return prepare_synthesis(path, load_settings(SynthesizeSettings, path), output_dir, model)


def run_synthesis(project: Path, folder: Path, settings: dict, model: CaptionerModel | None = None) -> dict:
    """Run the stage and return its summary; the outputs are in the folder's `out/`."""
    folder.mkdir(exist_ok=True)
    write_yaml(folder / "config.yaml", settings)
    recipe = read_synthesize_settings(folder / "config.yaml", folder / "out", model)
    return run_recipe(recipe, project / "data/pairs.jsonl", folder / "out", SYNTHESIZED).as_dict()


def build_synthesis_command(project: Path, folder: Path, *flags: object) -> list[str]:
    """Return the stage's command for the `config.yaml` in the folder."""
    script = PROJECT / "workflow_scripts/synthesize_captions.py"
    data, output = project / "data/pairs.jsonl", folder / "out"
    command = [forked_python(), script, "--config", folder / "config.yaml", "--data", data, "--output-dir", output]
    return [str(word) for word in (*command, *flags)]
