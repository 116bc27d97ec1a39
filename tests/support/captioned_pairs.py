"""The synthesize stage on twenty pairs, with a random MGM as captioner."""

from pathlib import Path

from dj2mgm.juicer.recipe_settings import CaptionerModel
from dj2mgm.settings.models import read_chat_template
from dj2mgm.storage.files import read_jsonl, write_yaml
from synthesis import build_synthesis_command, build_synthesis_settings, run_synthesis

CAPTIONS = [f"picture {number} of a {word}" for number, word in enumerate(["cat", "dog", "sea", "road", "tree"] * 4)]


def build_captioner_settings(project: Path, folder: Path, process: list[dict]) -> dict:
    captioner = {"name": "mgm", "template": read_chat_template("plain"), "question": ""}
    sizes = {"num_beams": 3, "batch_size": 4, "max_new_tokens": 5}
    return build_synthesis_settings(project, folder, process, captioner | sizes)


def build_captioner_model(project: Path) -> CaptionerModel:
    return CaptionerModel(project / "base", project / "pretrain")


def synthesize(project: Path, folder: Path, settings: dict) -> dict:
    return run_synthesis(project, folder, settings, build_captioner_model(project))


def build_command(project: Path, folder: Path, settings: dict, captioner: bool = True) -> list[str]:
    write_yaml(folder / "config.yaml", settings)
    model = ["--captioner-model", project / "base", "--captioner-stage", project / "pretrain"] if captioner else []
    return build_synthesis_command(project, folder, *model)


def read_rows(path: Path) -> dict[str, dict]:
    return {row["id"]: row for row in read_jsonl(path)}
