"""`snakemake check` in a project: its output and page, and a new check after a change of the data."""

import json
import re
import zipfile

import pytest

from accessibility import VIEWS, find_serious
from dj2mgm.storage.files import read_json, read_yaml
from small_project import copy_project
from source_files import folder as write_photos


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Return a project with the check of a folder of photos, the photos, and the check's output."""
    project = copy_project(tmp_path_factory.mktemp("project"))
    photos = write_photos(tmp_path_factory.mktemp("data") / "my photos ü")
    (photos / "003.txt").unlink()
    return project, photos, project.run("check", config=(f"dataset={photos}",))


def test_check_reads_own_photos_and_trains_nothing(checked):
    project, photos, printed = checked
    text = re.sub(r"\s+", " ", printed)
    assert "21 of 24 rows to train on" in text and "1 without a caption (003.png)" in text
    assert "recognized as" not in text and ": sources: captions: format: folder" in text
    assert f"snakemake baseline --config 'dataset={photos}' model=qwen3-vl-2b" in text
    assert "snakemake fetch --config model=qwen3-vl-2b && snakemake baseline" in text, "the model is not here"
    assert "`model=<name>` adds the lengths in tokens." in text and "the model small" not in text
    assert "made for rendered scenes" not in text
    assert "Enough for a verdict?" in text
    assert "make_dataset" not in project.job_counts("baseline", config=(f"dataset={photos}",)), "its work is used"
    assert {path.name for path in (project.folder / "results").iterdir()} <= {"datasets", "check"}


def test_a_plan_counts_the_photos_and_reads_their_sizes(checked):
    project, photos, _ = checked
    folder = f"results/datasets/{photos.name}"
    project.run("results/plan/config.yaml", config=(f"dataset={photos}",))
    settings = read_yaml(project.folder / "results/plan/config.yaml")
    assert settings["dataset"] == folder and settings["max_length"] > 0
    counts = project.job_counts("plan", "--forcerun", "make_dataset", config=(f"dataset={photos}",))
    assert counts["make_dataset"] == 1, "a plan needs the dataset"


def test_photos_and_captions_are_no_inputs_of_jobs(checked):
    project, _, _ = checked
    records = map(read_json, (project.folder / ".snakemake/metadata").iterdir())
    [inputs] = {tuple(record["input"]) for record in records if record["rule"] == "make_dataset"}
    assert not [file for file in inputs if file.endswith((".png", ".txt"))], "Snakemake would hash each of thousands"


def test_check_runs_again_after_a_change_of_the_data(checked):
    project, photos, _ = checked
    config, text = (f"dataset={photos}",), f"results/datasets/{photos.name}/check/check.txt"
    assert project.job_counts(text, config=config) == {}
    (photos / "003.txt").write_text("a late caption", encoding="utf-8")
    assert project.job_counts(text, config=config) == {"make_dataset": 1, "check_dataset": 1}
    assert "22 of 24 rows to train on" in project.run("check", config=config)


def test_a_problem_ends_the_command(checked):
    project, photos, _ = checked
    for number in range(10, 24):
        (photos / f"{number:03d}.png").write_bytes(b"not an image")
    printed = project.run("check", ok=False, config=(f"dataset={photos}",))
    assert "rows cannot be used" in printed and "Traceback" not in printed


def test_an_earlier_page_is_deleted_if_the_data_cannot_be_read(tmp_path):
    project = copy_project(tmp_path / "project")
    images = [f"{number % 3}/{number}.jpg" for number in range(24)]
    rows = [{"id": name, "image": name, "conversations": [{"from": "human", "value": "<image>"}]} for name in images]
    for row in rows:
        row["conversations"].append({"from": "gpt", "value": f"caption {row['id']}"})
    data = tmp_path / "llava"
    data.mkdir()
    (data / "rows.json").write_text(json.dumps(rows))
    with zipfile.ZipFile(data / "images.zip", "w") as archive:
        for name in images:
            archive.writestr(name, b"image")
    page = project.folder / "results/datasets/llava/check/check.html"
    page.parent.mkdir(parents=True)
    page.touch()
    printed = project.run("check", ok=False, config=(f"dataset={data}",))
    assert f"unpack images.zip with `python -m zipfile --extract {data}/images.zip {data}`" in printed
    assert not page.exists()
    page.parent.mkdir(exist_ok=True)  # Snakemake removes it if no job has written a file there
    page.touch()
    (data / "rows.json").unlink()
    assert "images.zip is an archive" in project.run("check", ok=False, config=(f"dataset={data}",))
    assert not page.exists()


@pytest.mark.parametrize(("size", "dark"), VIEWS)
def test_page_has_no_serious_barriers(browser, checked, size, dark):
    project, photos, _ = checked
    browser.open(project.folder / f"results/datasets/{photos.name}/check/check.html", *size, dark)
    browser.evaluate("document.querySelectorAll('details').forEach(details => (details.open = true))")
    assert find_serious(browser) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    requests = [event["request"]["url"] for event in browser.reported("Network.requestWillBeSent")]
    assert len([url for url in requests if not url.startswith("data:")]) == 1
