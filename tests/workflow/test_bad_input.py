"""Users' errors, end to end: one sentence names the file, the row or key, and the remedy."""

import json
import os
import re
import shutil

import pytest

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.shapes import describe_scene, draw_image, draw_row_scene
from dj2mgm.storage.files import write_text
from source_files import WRITERS

DROP = "jsonl={on_bad_row: drop}"


@pytest.fixture
def own_data(tmp_path):
    """Make a user's folder of twelve pairs; its path has a space and an umlaut."""
    folder = tmp_path / "meine Bilder ü"
    (folder / "images").mkdir(parents=True)
    rows = []
    for index in range(12):
        scene = draw_row_scene(3, "own", index)
        draw_image(scene).save(folder / "images" / f"{index}.png")
        rows.append({"id": str(index), "text": build_dj_text(describe_scene(scene)), "images": [f"images/{index}.png"]})
    write(folder, rows)
    return folder


def write(folder, rows):
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(folder):
    return [json.loads(line) for line in (folder / "captions.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("words", [("dataset", "=", "x"), ("dataset=x", "check"), ("finetune.learning_rate=1",)])
def test_words_after_config_that_are_not_keys_are_named_in_one_sentence(fresh, words):
    """Snakemake itself would print a traceback."""
    printed = fresh.run("--dry-run", ok=False, config=words)
    [word] = [word for word in words if word not in ("=", "x", "dataset=x")]
    assert f"Error: --config: expected key=value, found {word}. " in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "finetune={lora: {r: 4, r: 5}}",
            "the command line's --config finetune: the key 'r' is stated twice; keep one",
        ),
        ("decontaminate={folders: [/no/such]}", "decontaminate.folders: there is no folder /no/such;"),
        (
            "model=mgm-2b",
            "model mgm-2b: it is not on this machine yet. `snakemake fetch --config model=mgm-2b` downloads 8.1 GB: ",
        ),
        ("finetune={attn_implementation: flash_attention_2}", "needs the package flash-attn, which is not installed"),
        ("evaluate={second_judge: ./config}", "evaluate.second_judge: ./config has no weights (model.safetensors)"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(fresh, config, message):
    printed = re.sub(r"\s+", " ", fresh.run("baseline", ok=False, config=(config,)))
    assert message in printed and "Traceback" not in printed
    assert not (fresh.folder / "results").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("dataset=photos", "dataset=photos: a setting follows --config, as in `snakemake baseline --config"),
        ("baslinee", "baslinee: nothing makes this target; did you mean baseline?"),
        ("results/small/small/basline/report", "nothing makes this target; did you mean results/small/small/baseline?"),
        ("finetune", "finetune: this rule serves every experiment; `snakemake baseline --until finetune`"),
    ],
)
def test_an_unknown_target_is_refused_in_a_sentence(fresh, target, message):
    printed = fresh.run(target, "--dry-run", ok=False)
    assert message in re.sub(r"\s+", " ", printed) and "Traceback" not in printed and ".smk" not in printed


def test_a_benchmark_without_its_declaration_is_named_in_a_sentence(fresh):
    module = fresh.folder / "workflow_scripts/dj2mgm/features/challenge/benchmarks/empty.py"
    module.write_text("", encoding="utf-8")
    printed = fresh.run("baseline", "--dry-run", ok=False)
    assert "is missing; see docs/extending.md" in re.sub(r"\s+", " ", printed) and ".smk" not in printed


def test_a_second_config_is_refused(fresh):
    printed = fresh.run("baseline", "--config", "model=tiny", "--dry-run", ok=False, config=("seeds=[1]",))
    assert "--config is given several times, of which Snakemake reads only the last" in re.sub(r"\s+", " ", printed)


def test_a_bad_experiment_file_fails_only_its_own_target(fresh):
    (fresh.folder / "config/experiments/bad.yaml").write_text("gpus: 010\n")
    (fresh.folder / "config/experiments/doctor.yaml").write_text("description: mine\n")
    sentence = "config/experiments/bad.yaml: 'gpus': YAML's versions disagree about 010"
    printed = fresh.run("baseline", "--dry-run")
    assert (
        printed.count(f"warning: {sentence}") == printed.count(". Other experiments are not affected.") - 1 == 1
        and "warning: config/experiments/doctor.yaml: doctor is a rule" in printed
    )
    assert fresh.run("bad", "--dry-run", ok=False).count(sentence) == 1, "not as a warning, too"
    printed = fresh.run("dj_synth", "--dry-run", ok=False, config=("report={experiments: [baseline, dj_synth, bad]}",))
    assert sentence in printed


def test_own_data_is_filtered_and_broken_images_are_named(fresh, own_data):
    """The folder's name has a space and an umlaut."""
    shutil.copy(own_data / "images/0.png", own_data.parent / "outside.png")
    rows = read(own_data)
    for index, image in enumerate(("../outside.png", "images/gone.png", "images/zero.png", "images/page.png")):
        rows.append({"id": f"bad{index}", "text": rows[0]["text"], "images": [image]})
    (own_data / "images/zero.png").touch()
    (own_data / "images/page.png").write_text("<html>not found</html>")
    write(own_data, rows)
    fresh.run("baseline", "--until", "write_jsonl", config=(f"dataset={own_data}", DROP))
    summary = json.loads((fresh.result("filter", dataset=own_data.name) / "summary.json").read_text())
    assert summary["broken_images"] == {"missing": 1, "outside": 1, "empty": 1, "undecodable": 1}
    rows_out = [
        json.loads(line)
        for line in (fresh.result("jsonl", dataset=own_data.name) / "pretrain.jsonl").read_text().splitlines()
    ]
    assert len(rows_out) == 10 and all(row["image"].startswith(str(own_data)) for row in rows_out)  # two are held out


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("baseline", b"caf\xe9"),
        ("results/photos/small/report/report.html", b"a{}b"),
        pytest.param("baseline", b"a\nb", marks=pytest.mark.slow),
    ],
)
def test_old_results_do_not_hide_a_mistake_in_other_data(fresh, target, file):
    """Snakemake drops a job that has become impossible, and uses the files that stages after it have left."""
    for page in ("results/photos/small/report/report.html", "results/photos/small/baseline/report/report.html"):
        write_text(fresh.folder / page, "the page of an earlier run")
    photos = WRITERS["folder"](fresh.folder / "photos")
    for suffix in (b".png", b".txt"):
        old = os.fsencode(photos) + b"/001" + suffix
        os.rename(old, os.fsencode(photos) + b"/" + file + suffix)
    printed = fresh.run(target, ok=False, config=("dataset=photos",))
    assert (
        "must be a path without braces" in printed
        and "Nothing to be done" not in printed
        and "Exception" not in printed
    )
