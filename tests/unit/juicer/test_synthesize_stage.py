"""The synthesize stage as a command: outputs, messages about invalid input, and resuming after a kill."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from captioned_pairs import (
    CAPTIONS,
    build_captioner_model,
    build_captioner_settings,
    build_command,
    read_rows,
    synthesize,
)
from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.juicer.engine import build_operators, check_installed
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.juicer.recipe_settings import CaptionerModel, read_filter_settings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.storage.files import read_jsonl, write_yaml
from forked_python import forked_python
from paths import PROJECT
from synthesis import OUTPUTS, read_synthesize_settings
from tiny_captioners import save_project
from tiny_clip import save_tiny_clip

RECIPE = PROJECT / "config/recipes/dj_synth.yaml"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Write twenty pairs in `data/`, a CLIP in `clip/`, and a captioner in `base/` and `pretrain/`, all random."""
    return save_project(tmp_path_factory.mktemp("project"), CAPTIONS)


@pytest.fixture(scope="module")
def limit(project) -> float:
    """Return the median similarity of the pairs."""
    [operator] = load_ops([{"batched_image_text_similarity_filter": {"hf_clip": str(project / "clip")}}])
    rows = list(read_jsonl(project / "data/pairs.jsonl"))
    images = [[str(project / "data" / row["images"][0])] for row in rows]
    samples = {"text": [row["text"] for row in rows], "images": images, Fields.stats: [{} for _ in rows]}
    scored = operator.compute_stats(samples)[Fields.stats]
    return float(np.median([stats["image_text_similarity"][0] for stats in scored]))


PROCESS = [{"text_length_filter": {"min_len": 1}}]


def make_process(min_similarity: float, min_score: float, min_log_likelihood: float) -> list[dict]:
    return [
        {"text_length_filter": {"min_len": 1}},
        {"low_similarity_recaption_mapper": {"min_similarity": min_similarity}},
        {"batched_image_text_similarity_filter": {"min_score": min_score, "max_score": max(min_score, 1.0)}},
        {"caption_log_likelihood_filter": {"min_log_likelihood": min_log_likelihood}},
    ]


def test_rows_add_up_and_new_captions_have_a_record(project, limit, tmp_path):
    synthesize(project, tmp_path, build_captioner_settings(project, tmp_path, make_process(limit, -10.0, -1000.0)))
    recaptions = [row["recaption"] for row in read_jsonl(tmp_path / "out/synthesized.jsonl") if "recaption" in row]
    likely = float(np.median([record["log_likelihood"] for record in recaptions]))
    summary = synthesize(
        project, tmp_path, build_captioner_settings(project, tmp_path, make_process(limit, -10.0, likely))
    )

    kept_rows, stats = read_rows(tmp_path / "out/synthesized.jsonl"), read_rows(tmp_path / "out/stats.jsonl")
    trace = list(read_jsonl(tmp_path / "out/dropped.jsonl"))
    dropped = {row["id"]: row for row in trace if row["event"] == "dropped"}
    assert list(kept_rows) == list(stats) == [f"r{i}" for i in range(20) if f"r{i}" not in dropped]
    assert len(kept_rows) + len(dropped) == 20 == summary["rows_in"]
    counts = summary["operators"][1]["recaption"]
    assert counts == {"below": 10, "captioned": 0, "cached": 10, "unusable": {}, "min_similarity": limit}
    assert summary["operators"][1]["changed"] == 10

    records = {row["id"]: row["recaption"] for row in (kept_rows | dropped).values() if "recaption" in row}
    assert len(records) == 10 and len(dropped) == 5 and set(dropped) < set(records)
    for number, identifier in enumerate(f"r{i}" for i in range(20)):
        record = records.get(identifier)
        if record is not None:
            assert set(record) == {"original", "original_similarity", "caption", "similarity", "log_likelihood"}
            assert record["original"] == CAPTIONS[number] and record["original_similarity"] < limit
        if identifier in kept_rows:
            assert kept_rows[identifier]["text"] == build_dj_text(record["caption"] if record else CAPTIONS[number])
            expected = [record["log_likelihood"]] if record else []  # Data-Juicer rounds stats to ten digits
            assert stats[identifier]["caption_log_likelihood"] == pytest.approx(expected)
            [score] = stats[identifier]["image_text_similarity"]
            assert score == pytest.approx(record["similarity"]) if record else score >= limit - 1e-9
        else:
            assert dropped[identifier]["operator"] == "caption_log_likelihood_filter"
            assert record["log_likelihood"] < likely
    [caption_file] = (tmp_path / "captions").rglob("*.jsonl")
    assert len(list(read_jsonl(caption_file))) == 10


def test_a_killed_captioning_run_resumes_with_the_same_bytes(project, tmp_path):
    settings = build_captioner_settings(project, tmp_path, make_process(10.0, -10.0, -1000.0))
    dies_in_third_batch = (
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv.pop(1))\n"
        "from dj2mgm.juicer.operators.captioners import Captioner\n"
        "say, batches = Captioner.__call__, []\n"
        "def dying(self, *arguments):\n"
        "    batches.append(1)\n"
        "    if len(batches) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return say(self, *arguments)\n"
        "Captioner.__call__ = dying\n"
        "from synthesize_captions import main; main()\n"
    )
    arguments = build_command(project, tmp_path, settings)
    killed = subprocess.run([forked_python(), "-c", dies_in_third_batch, PROJECT / "workflow_scripts", *arguments[2:]])
    assert killed.returncode == -signal.SIGKILL
    assert not [name for name in OUTPUTS if (tmp_path / "out" / name).exists()]
    [captions] = (tmp_path / "captions").rglob("*.jsonl")
    assert len(captions.read_bytes().splitlines()) == 8

    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "out/summary.json").read_text())["operators"][1]["recaption"]
    assert (counts["captioned"], counts["cached"]) == (12, 8)
    assert "Loading weights" not in done.stderr
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*OUTPUTS, "summary.json"])
    (tmp_path / "whole").mkdir()
    synthesize(
        project,
        tmp_path / "whole",
        build_captioner_settings(project, tmp_path / "whole", make_process(10.0, -10.0, -1000.0)),
    )
    for name in OUTPUTS:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole/out" / name).read_bytes()


@pytest.mark.slow
def test_captions_of_two_ray_processes_equal_those_of_one(project, tmp_path):
    process = make_process(0.0, 0.0, -1000.0)[1:]
    process[0]["low_similarity_recaption_mapper"] = {"keep_fraction": 0.5}
    process[1]["batched_image_text_similarity_filter"] = {"keep_fraction": 0.7}
    summaries = {}
    for name, gpus in (("default", 1), ("ray", 2)):
        (tmp_path / name).mkdir()
        settings = build_captioner_settings(project, tmp_path / name, process) | {"gpus": gpus}
        done = subprocess.run(build_command(project, tmp_path / name, settings), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        summaries[name] = json.loads((tmp_path / name / "out/summary.json").read_text())
    for name in OUTPUTS:
        assert (tmp_path / "default/out" / name).read_bytes() == (tmp_path / "ray/out" / name).read_bytes()
    assert summaries["ray"]["operators"][0]["recaption"] == summaries["default"]["operators"][0]["recaption"]
    assert summaries["ray"]["operators"][0]["recaption"]["captioned"] == 10 and summaries["ray"]["rows_kept"] >= 14


def test_a_threshold_that_keeps_nothing_suggests_others(project, tmp_path):
    settings = build_captioner_settings(project, tmp_path, make_process(5.0, 5.0, -1000.0))
    with pytest.raises(InputError) as caught:
        synthesize(project, tmp_path, settings)
    message = str(caught.value)
    assert "batched_image_text_similarity_filter (step 3) dropped the most rows (20 of 20)" in message
    for word in ("image_text_similarity: lowest -", "median", "highest", "min_score", "would keep 10%", "50%"):
        assert word in message
    share, limit = suggestion(message, 1)
    (tmp_path / "wider").mkdir()
    wider = build_captioner_settings(project, tmp_path, make_process(5.0, limit, -1000.0))
    assert synthesize(project, tmp_path / "wider", wider)["rows_kept"] == round(20 * share / 100)


def suggestion(message: str, index: int) -> tuple[int, float]:
    """Return the pairs (share in percent, limit) of `min_score <limit> would keep <share>%`."""
    words = message[message.index("min_score") :].split(")")[0].split(", ")[index].split()
    return int(words[-1].rstrip("%")), float(words[1])


def test_the_filter_stage_states_the_share_kept_by_limits(project, tmp_path):
    process = [{"text_length_filter": {"min_len": 9000}}]
    write_yaml(tmp_path / "config.yaml", base_settings(project) | {"recipe": {"process": process}})
    with pytest.raises(
        InputError,
        match=r"text_len: lowest 18, median 19, highest 20; min_len 20 would keep 20%, min_len 19 would keep 70%",
    ):
        run_recipe(read_filter_settings(tmp_path / "config.yaml"), project / "data/pairs.jsonl", tmp_path, FILTERED)


def test_the_filter_stage_adds_its_clip(project, tmp_path):
    process = [{"batched_image_text_similarity_filter": {"min_score": -1.0}}]
    settings = base_settings(project) | {"recipe": {"process": process}, "clip": str(project / "clip")}
    write_yaml(tmp_path / "config.yaml", settings)
    summary = run_recipe(
        read_filter_settings(tmp_path / "config.yaml"), project / "data/pairs.jsonl", tmp_path, FILTERED
    )
    assert summary.rows_kept == 20


def base_settings(project: Path) -> dict:
    return {"image_root": str(project / "data"), "processes": 1}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "CLIP folder .*broken has no weights \\(model.safetensors\\). Save the whole model"),
        ("config.json", "has no config \\(config.json\\)"),
        ("tokenizer.json", "has no tokenizer \\(tokenizer.json\\)"),
        ("processor_config.json", "has no image processor \\(processor_config.json\\)"),
    ],
)
def test_the_missing_part_of_a_clip_folder_is_named(project, tmp_path, file, message):
    save_tiny_clip(tmp_path / "broken")
    (tmp_path / "broken" / file).unlink()
    settings = build_captioner_settings(project, tmp_path, make_process(0.1, -1.0, -9.0)) | {
        "clip": str(tmp_path / "broken")
    }
    with pytest.raises(InputError, match=message) as caught:
        synthesize(project, tmp_path, settings)
    assert "\n" not in str(caught.value)


def test_the_captioner_mgm_needs_its_folders(project, tmp_path):
    settings = build_captioner_settings(project, tmp_path, make_process(0.1, -1.0, -9.0))
    done = subprocess.run(build_command(project, tmp_path, settings, captioner=False), capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "the captioner mgm is a model" in line and "--captioner-model" in line and "--captioner-stage" in line
    with pytest.raises(InputError, match="base has no projector.safetensors, so it is not a captioner's folder"):
        model = CaptionerModel(project / "base", project / "base")
        read_synthesize_settings(tmp_path / "config.yaml", tmp_path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"captioner": {"name": "blip"}}, "captioner.name: expected mgm, blip2 or openai, found 'blip'"),
        ({"captioner": {"name": "openai", "max_tokens": 8}}, "captioner.model: the key is missing"),
        ({"captioner": {"name": "blip2", "modl": "x"}}, "captioner.modl: unknown key; did you mean 'model'?"),
    ],
)
def test_messages_about_invalid_settings_name_file_and_key(project, tmp_path, change, message):
    write_yaml(tmp_path / "config.yaml", build_captioner_settings(project, tmp_path, PROCESS) | change)
    with pytest.raises(InputError, match=re.escape(f"config.yaml: {message}")):
        read_synthesize_settings(tmp_path / "config.yaml", tmp_path, build_captioner_model(project))


def test_a_captioner_of_the_settings_becomes_an_operator(project, tmp_path):
    settings = build_captioner_settings(project, tmp_path, PROCESS)
    blip2 = {"name": "blip2", "model": "Salesforce/blip2-opt-2.7b", "batch_size": 8}
    sizes = {"gpu_batch_size": 8, "batch_size": 8}
    operator = {"hf_img2seq": "Salesforce/blip2-opt-2.7b", "keep_original_sample": False} | sizes
    for captioner, expected in ((None, None), (blip2, {"image_captioning_mapper": operator})):
        write_yaml(tmp_path / "config.yaml", settings | {"captioner": captioner})
        read = read_synthesize_settings(tmp_path / "config.yaml", tmp_path, None)
        assert read.arguments["low_similarity_recaption_mapper"]["captioner"] == expected


def test_two_runs_never_write_the_same_file_of_captions(project, tmp_path):
    write_yaml(tmp_path / "config.yaml", build_captioner_settings(project, tmp_path, PROCESS))
    writers = [
        read_synthesize_settings(
            tmp_path / "config.yaml", Path("results") / run / "synthesize", build_captioner_model(project)
        )
        for run in ("dj_synth", "dj_synth/seed-1", "other")
    ]
    assert len({settings.arguments["low_similarity_recaption_mapper"]["writer"] for settings in writers}) == 3


def test_the_recipe_of_dj_synth_builds(project, tmp_path):
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    write_yaml(tmp_path / "config.yaml", build_captioner_settings(project, tmp_path, recipe["process"]))
    settings = read_synthesize_settings(tmp_path / "config.yaml", tmp_path, build_captioner_model(project))
    steps = settings.complete(settings.steps)
    check_installed(steps)
    mapper, similarity, likelihood = build_operators(steps, tmp_path)
    assert mapper.keep_fraction == similarity.keep_fraction == 0.5
    assert similarity.hf_clip == str(project / "clip") and likelihood.min_log_likelihood == -3.0
