"""Commands of docs/tutorial.md: their planned jobs, and (slow) a run on data like the embedded dataset."""

import re
import shlex
import subprocess
import sys

import pytest

from dj2mgm.dataset_resolution.experiment_dataset import find_hub_dataset
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.settings.config_files import list_config_names
from dj2mgm.settings.models import TransformersModel
from paths import PROJECT

PAGE = (PROJECT / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines()]
SNAKEMAKE = {words[1]: words[2:] for words in COMMANDS if words[0] == "snakemake"}
# settings of the small project, which learns nothing in a few steps
QUICK = {"publish": ("publish={allow_unlearned: true}",), "decide": ("decide={seeds: 2}",)}


def run(project, target: str, *more: str) -> str:
    """Run a command of the page in the small project."""
    words = SNAKEMAKE[target]
    arguments, config = words, []
    if "--config" in words:
        index = words.index("--config")
        arguments, config = words[:index], words[index + 1 :]
    assert not arguments
    return project.run(target, *more, config=(*config, *QUICK.get(target, ())))


def test_steps_are_in_order():
    assert list(SNAKEMAKE) == ["fetch", "doctor", "plan", "baseline", "dj_synth", "decide", "publish"]
    programs = {words[0] for words in COMMANDS}
    assert programs == {"make", "source", "sed", "snakemake", "python"}


def test_stages_equal_those_on_the_page(fresh):
    for target in ("baseline", "dj_synth"):
        [output] = re.findall(rf"^```\n((?:[\[…].*\n)+){target}: done", PAGE, flags=re.MULTILINE)
        assert set(re.findall(r"\] (\w+) ", output)) <= fresh.job_counts(target).keys(), target


def test_the_fetched_model_and_dataset_are_known(tmp_path, monkeypatch):
    """`sed` sets the fetched model and dataset as defaults."""
    fetched = dict(word.split("=") for word in SNAKEMAKE["fetch"] if "=" in word)
    assert fetched["model"] in list_config_names("models") and find_hub_dataset(fetched["dataset"])
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_bytes((PROJECT / "config/config.yaml").read_bytes())
    [sed] = [words for words in COMMANDS if words[0] == "sed"]
    subprocess.run(sed, cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    config = merge_experiment("baseline", {})
    assert (config.model.name, config.dataset) == (fetched["model"], fetched["dataset"])
    assert isinstance(config.model, TransformersModel)


@pytest.mark.slow
def test_the_commands_succeed(synthesized, licensed):
    folder = synthesized.folder
    page = "results/shapes/tiny/report/report.html"
    assert page in PAGE and (folder / page.replace("shapes/tiny", "small/small")).with_name("verdict.json").is_file()
    [explore] = [
        [word.replace("shapes/tiny", "small/small") for word in words] for words in COMMANDS if words[0] == "python"
    ]
    subprocess.run([sys.executable, *explore[1:]], cwd=folder, check=True)
    assert (folder / explore[-1]).stat().st_size > 10_000
    assert "Power: " in run(synthesized, "plan")
    assert "After 2 of at most 2 seeds, the verdict is withheld" in run(synthesized, "decide")
    run(synthesized, "publish")
    for kind in ("model", "dataset"):
        assert (folder / f"results/published/small/small/dj_synth/{kind}/README.md").is_file()
