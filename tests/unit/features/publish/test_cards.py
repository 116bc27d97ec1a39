"""Cards of published models and datasets: numbers agree with the record, and changed numbers are found."""

import json
import os
import re
from dataclasses import replace

import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard, ModelCard

import publish_dataset
import publish_model
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset
from dj2mgm.errors import InputError
from dj2mgm.features.publish.cards import build_model_card
from dj2mgm.features.publish.exports import Sample, build_export_card, write_parquet
from dj2mgm.features.publish.publication import (
    RECORDS,
    RunRecord,
    build_publish_settings,
    copy_records,
    format_value,
    reporting_full_disk,
)
from dj2mgm.features.publish.publish_settings import ExportSettings, build_license_keys, check_licenses
from dj2mgm.features.publish.pushing import push
from dj2mgm.records import VERDICT_FILE, RecipeContents, write_verdicts
from dj2mgm.reporting.comparison import compare_with_first, tabulate_scores, write_table
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.runs.all_runs import Runs
from dj2mgm.settings.dataset_files import ReadableDataset
from dj2mgm.storage.files import read_json, read_yaml, write_json, write_yaml
from report_results import write_results
from run_main import run_main
from source_files import PAIR
from tiny_models import save_image

OWN = "/dj_synth/finetune~1own"
FIGURE = re.compile(r'\[([^][\n]*)\]\(records/([^ )[\n]+) "([^"\n]*)"\)')


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Write results of two experiments with two seeds, and return the settings that publish the second one."""
    root = tmp_path_factory.mktemp("results")
    page = write_results(root)
    experiments = load_experiments(page)
    write_table(tabulate_scores(experiments, compare_with_first(experiments)), root / "comparison.csv")
    settings = build_publish_settings(runs := Runs({}), runs.first_seed("dj_synth"))
    [entry] = [entry for entry in read_yaml(page)["experiments"] if entry["name"] == "dj_synth"]
    write_verdicts(root / VERDICT_FILE, {"dj_synth": {"learning_faults": []}})
    records = {"dataset/summary.json": f"{entry['dataset']}/summary.json"}
    records |= {name: f"{root}/{name}" for name in ("comparison.csv", VERDICT_FILE)}
    for name in settings.records.keys() - records.keys():
        stage, file = name.split("/")
        records[name] = f"{entry['runs'][0]['stages'][stage]}/{file}"
        if file == "config.yaml":
            lora = {"lora": {"r": 16, "alpha": 32, "dropout": 0.05}} if stage == "finetune" else {}
            write_yaml(records[name], {"learning_rate": 0.001, "lr_scheduler": "cosine"} | lora)
    return settings.model_copy(update={"records": records})


@pytest.fixture
def published(finished, tmp_path):
    copy_records(finished.records, tmp_path, "model", finished)
    build_model_card(finished, RunRecord(tmp_path), adapter=True, chat=True).save(tmp_path / "README.md")
    return tmp_path


def test_card_agrees_with_record_and_metadata_are_valid(published, finished):
    record, figures = RunRecord(published), FIGURE.findall(read_card(published))
    assert len(figures) > 50 and format_value(0.00001234) == "1.234e-05"
    for figure, file, pointer in figures:
        assert figure == format_value(record.get_value(file, pointer), figure.partition(" ")[2]), pointer
    data = ModelCard.load(published / "README.md").data
    assert (data.license, data.pipeline_tag) == ("apache-2.0", "image-text-to-text")
    table = {
        tuple(line.split(",")[i] for i in (0, 2, 3)): line.split(",")
        for line in open(finished.records["comparison.csv"], encoding="utf-8").read().splitlines()
    }
    assert len(data.eval_results) > 3
    for result in data.eval_results:
        assert result.metric_value == float(table["dj_synth", "finetune/own", result.metric_type][4])
    [shown] = re.findall(rf'\[([^\]]*)\]\(records/comparison.csv "{OWN}/vqa_accuracy/value"\)', read_card(published))
    assert shown == f"{100 * float(table['dj_synth', 'finetune/own', 'vqa_accuracy'][4]):.1f} %"
    steps = json.loads(open(finished.records["filter/summary.json"], encoding="utf-8").read())["operators"]
    assert all(f"[{step['rows_out']}](records/filter" in read_card(published) for step in steps)


def read_card(folder) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("script", "flags"), [(publish_model, ("--model", "--stage")), (publish_dataset, ("--exported",))]
)
def test_unlearned_models_are_published_on_request_only(finished, tmp_path, capsys, script, flags):
    fault = {"reason": "The stage finetune took 6 optimizer steps", "remedy": "Raise finetune.epochs"}
    write_verdicts(tmp_path / VERDICT_FILE, {"dj_synth": {"learning_faults": [fault]}})
    settings = finished.model_copy(update={"records": finished.records | {VERDICT_FILE: str(tmp_path / VERDICT_FILE)}})
    write_yaml(tmp_path / "config.yaml", settings.file_content())
    folder_flags = [part for flag in flags for part in (flag, str(tmp_path))]
    output = tmp_path / "published"
    done = run_main(script, f"--config={tmp_path}/config.yaml", *folder_flags, f"--output-dir={output}", capture=capsys)
    assert done.status == 2 and not output.exists()
    assert (
        "publish: the model of dj_synth has learned nothing measurable. The stage finetune took 6 "
        "optimizer steps. Raise finetune.epochs, then run `snakemake dj_synth` again, or add "
        "`--config publish='{allow_unlearned: true}'` to publish it as it is"
    ) in " ".join(done.stderr.split())
    copy_records(settings.records, output, "model", settings)
    card = str(build_model_card(settings, RunRecord(output), adapter=True, chat=True))
    assert (
        "**Nothing shows that this model learned anything.** [verdict.json](records/verdict.json) states why." in card
    )


def test_published_dataset_loads(finished, tmp_path, monkeypatch, capsys):
    write_export(tmp_path / "exported")
    write_yaml(tmp_path / "config.yaml", finished.file_content())
    flags = ["--config", "config.yaml", "--exported", "exported", "--output-dir", "out/dataset"]
    monkeypatch.chdir(tmp_path)
    done = run_main(publish_dataset, *flags, capture=capsys)
    assert done.status == 0, done.stderr
    folder = tmp_path / "out/dataset"
    rows = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["caption"] == ["a", "b"] and rows["image"][0].size == (8, 8)
    card = DatasetCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0" and "`score`" in card.text
    records = {file.split("/")[0] for _, file, _ in FIGURE.findall(read_card(folder))}
    assert records == {"dataset", "filter", "synthesize"}


def write_export(exported) -> None:
    image = save_image(exported / "a.png", size=(8, 8))
    write_parquet((Sample(text, image, text, "", "", "", {"score": 0.5}) for text in "ab"), exported)
    recipes = RecipeContents(filter={"process": []}, synthesize=None)
    licenses = {"": "apache-2.0"}
    settings = ExportSettings(
        experiment="dj_synth", dataset="shapes", licenses=licenses, image_root=".", recipes=recipes
    )
    card = build_export_card(settings, "parquet", 2, 0, ["score"], {"pretrain": 2}, {})
    (exported / "README.md").write_text(card, encoding="utf-8")


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """Return a function that writes a dataset file and resolves it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(PAIR)

    def write(**keys) -> ReadableDataset:
        write_yaml(tmp_path / "config/datasets/mine.yaml", keys)
        return resolve_dataset("mine").settings

    return write


def test_source_without_license_is_named_with_its_key(describe):
    licensed, unlicensed = ({"format": "data_juicer", "path": "a.jsonl"} for _ in "12")
    with pytest.raises(
        InputError, match=r"two has no license, and nothing is published without one; state sources\.two\.license"
    ):
        check_licenses("mine", describe(sources={"one": licensed | {"license": "mit"}, "two": unlicensed}))
    split = {"file": "a.jsonl", "images": "."}
    message = r"pretrain has no license, and .*; state pretrain\.license in config/datasets/mine\.yaml"
    with pytest.raises(InputError, match=message):
        check_licenses("mine", describe(pretrain=split))
    check_licenses("mine", describe(pretrain=split | {"license": "CC-BY-4.0"}))


@pytest.mark.parametrize(("folder", "name"), [("my phötos (2)", "my_photos_2"), ("photos", "photos")])
def test_remedy_for_folder_without_license_works(describe, tmp_path, folder, name):
    (tmp_path / folder).mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / folder / "a.jsonl")
    remedy = rf"describe the folder in config/datasets/{name}\.yaml with pretrain\.license .*: {name}$"
    message = f"pretrain has no license, and nothing is published without one; {remedy}"
    with pytest.raises(InputError, match=message):
        check_licenses(folder, resolve_dataset(str(tmp_path / folder)).settings)
    split = {"file": f"{folder}/a.jsonl", "images": folder, "license": "mit"}
    write_yaml(tmp_path / f"config/datasets/{name}.yaml", {"pretrain": split})
    check_licenses(name, resolve_dataset(name).settings)


def test_license_is_not_in_the_settings_of_stages(describe):
    source, split = {"format": "data_juicer", "path": "a.jsonl"}, {"file": "a.jsonl", "images": "."}
    for keys, licensed in (
        ({"pretrain": split}, {"pretrain": split | {"license": "mit"}}),
        ({"sources": {"a": source}}, {"sources": {"a": source | {"license": "mit"}}}),
    ):
        bare, full = describe(**keys), describe(**licensed)
        assert bare.file_content() == full.file_content() and "mit" in full.licenses.values()


def test_card_uses_license_identifiers_of_the_hub():
    assert build_license_keys("CC-BY-4.0") == {"license": "cc-by-4.0"}
    assert build_license_keys("MIT", "cc0-1.0") == {"license": "other", "license_name": "cc0-1.0, MIT"}
    assert build_license_keys("My own terms") == {"license": "other", "license_name": "My own terms"}


@pytest.mark.parametrize(
    ("model", "publish", "message"),
    [
        (
            {"license": ""},
            {},
            "tiny has no license, and nothing is published without one; state license in config/models/tiny.yaml",
        ),
        ({}, {"weights": "adapter"}, "publish.weights: an adapter needs a base model that other libraries load"),
    ],
)
def test_unpublishable_run_is_refused_early(model, publish, message):
    runs = Runs({"publish": publish})
    run = runs.first_seed("dj_synth")
    changed = run.config.model.model_copy(update=model)
    run = replace(run, config=run.config.model_copy(update={"model": changed}))
    with pytest.raises(InputError, match=message):
        build_publish_settings(runs, run)


def test_a_full_disk_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="does not fit on the disk; free space"):
        with reporting_full_disk(tmp_path), open("/dev/full", "w") as file:
            file.write("a" * 10**6)
    with pytest.raises(PermissionError), reporting_full_disk(tmp_path):
        raise PermissionError(13, "not allowed")


@pytest.mark.parametrize("kind", ["pipe", "link", "pipe in records"])
def test_a_published_folder_contains_only_regular_files(published, finished, kind):
    path = published / ("records/more.json" if kind == "pipe in records" else "README.md")
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    with pytest.raises(InputError, match=f"{path} is not a regular file but a (pipe|link)"):
        push(published, "model", "me/model", private=True)


def test_rows_of_instructions_are_not_pairs(finished, tmp_path):
    """A stage that selects instructions belongs to a model's card, but not to a dataset of pairs."""
    copy_records(finished.records, tmp_path, "dataset", finished)
    whole = RunRecord(tmp_path)
    assert whole.stages_of_pairs == ["filter", "synthesize"]
    operators = len(list(whole.iterate_operators(pairs_only=False)))
    assert operators == len(list(whole.iterate_operators(pairs_only=True)))
    file = tmp_path / RECORDS / "synthesize/summary.json"
    write_json(file, read_json(file) | {"rows": "instructions"})
    record = RunRecord(tmp_path)
    assert record.stages_of_pairs == ["filter"]
    assert {stage for stage, _, _ in record.iterate_operators(pairs_only=True)} == {"filter"}
    assert len(list(record.iterate_operators(pairs_only=False))) == operators
