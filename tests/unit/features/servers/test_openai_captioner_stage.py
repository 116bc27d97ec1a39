"""The synthesize stage with a server requests no caption twice and accounts for all rows."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.juicer import engine
from dj2mgm.juicer.chain import Chain, Step
from dj2mgm.juicer.engine import build_operators
from dj2mgm.juicer.partitions import import_rows, list_partitions
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.storage.files import read_jsonl, read_yaml, write_yaml
from paths import PROJECT
from scripted_server import MODEL, CaptionRequest, Reply, ScriptedServer, caption
from synthesis import (
    OUTPUTS,
    build_synthesis_command,
    build_synthesis_settings,
    read_synthesize_settings,
    run_synthesis,
)
from tiny_captioners import write_pairs
from tiny_clip import save_tiny_clip

COUNT = 20
CAPTIONS = [f"picture {number}" for number in range(COUNT)]
KEY, VARIABLE = "sk-Secret_123", "TEST_CHAT_KEY"


pytestmark = pytest.mark.usefixtures("quick_requests")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Write twenty pairs in `data/` and a CLIP in `clip/`."""
    folder = tmp_path_factory.mktemp("project")
    write_pairs(folder / "data", CAPTIONS)
    save_tiny_clip(folder / "clip")
    return folder


def describe_image(request: CaptionRequest) -> Reply:
    """Return a caption that depends only on the image."""
    return caption(f"pixels {request.image.getpixel((0, 0))}")


def make_settings(project: Path, folder: Path, url: str, **changes) -> dict:
    process = [
        {"low_similarity_recaption_mapper": {"min_similarity": 10.0}},
        {"batched_image_text_similarity_filter": {"min_score": -10.0}},
        {"caption_log_likelihood_filter": {"min_log_likelihood": -3.0}},
    ]
    defaults = read_yaml(PROJECT / "config/config.yaml")["synthesize"]["openai"]
    server_keys = {"base_url": url, "model": MODEL, "concurrency": 4, "retries": 1}
    captioner = {"name": "openai"} | defaults | server_keys | changes
    return build_synthesis_settings(project, folder, process, captioner)


def write_settings(project: Path, folder: Path, url: str, **changes) -> None:
    folder.mkdir(exist_ok=True)
    write_yaml(folder / "config.yaml", make_settings(project, folder, url, **changes))


def synthesize(project: Path, folder: Path, url: str, **changes) -> dict:
    return run_synthesis(project, folder, make_settings(project, folder, url, **changes))


def kept_captions(folder: Path) -> list[dict]:
    return [row for path in (folder / "captions").rglob("*.jsonl") for row in read_jsonl(path)]


def read_report(summary: dict) -> dict:
    return summary["operators"][0]["recaption"]


def test_a_servers_captions_need_no_likelihoods(project, tmp_path):
    with ScriptedServer(describe_image) as server:
        summary = synthesize(project, tmp_path, server.url)
    assert server.requests == COUNT and set(server.request_counts.values()) == {1}
    assert read_report(summary) == {
        "below": COUNT,
        "captioned": COUNT,
        "cached": 0,
        "unusable": {},
        "min_similarity": 10.0,
        "server": {"requests": COUNT, "answers": COUNT, "tokens": 10 * COUNT},
    }
    rows, stats = (list(read_jsonl(tmp_path / "out" / name)) for name in OUTPUTS[:2])
    assert len(rows) == COUNT, "a caption without a likelihood passes the filter of likelihoods"
    for row, measured, original in zip(rows, stats, CAPTIONS, strict=True):
        record = row["recaption"]
        assert row["text"] == build_dj_text(record["caption"]) and record["caption"].startswith("pixels (")
        assert (record["original"], record["log_likelihood"]) == (original, None)
        assert measured["image_text_similarity"] == pytest.approx([record["similarity"]])
        assert measured["caption_log_likelihood"] == []


def test_a_killed_stage_requests_only_missing_answers(project, tmp_path):
    """Kill the stage while the server hangs after eight answers, and start it again."""
    with ScriptedServer(
        lambda request: describe_image(request) if request.number <= 8 else Reply(action="hang")
    ) as server:
        write_settings(project, tmp_path, server.url)
        killed = subprocess.Popen(build_synthesis_command(project, tmp_path), stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(kept_captions(tmp_path)) < 8 or server.in_flight < 4 and server.requests < 12:
            assert time.monotonic() < deadline and killed.poll() is None
            time.sleep(0.02)
        killed.kill()
        killed.wait()
        assert not [name for name in OUTPUTS if (tmp_path / "out" / name).exists()]
        assert len(kept_captions(tmp_path)) == server.caption_counts.total() == 8 and server.requests == 12
        server.reply = describe_image
        done = subprocess.run(build_synthesis_command(project, tmp_path), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert server.requests == 12 + COUNT - 8
        assert len(server.caption_counts) == COUNT and set(server.caption_counts.values()) == {1}
        synthesize(project, tmp_path / "whole", server.url)
    report = read_report(json.loads((tmp_path / "out/summary.json").read_text()))
    assert (report["captioned"], report["cached"], report["server"]["requests"]) == (12, 8, 12)
    for name in OUTPUTS:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole/out" / name).read_bytes()


def test_two_concurrent_stages_request_each_image_once(project, tmp_path):
    """Run two stages at the same time, like the seeds of an experiment on a cluster."""

    def slow(request):
        time.sleep(0.1)
        return describe_image(request)

    with ScriptedServer(slow) as server:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            settings = make_settings(project, tmp_path, server.url)
            write_yaml(tmp_path / name / "config.yaml", settings)
        runs = [subprocess.Popen(build_synthesis_command(project, tmp_path / name)) for name in ("one", "two")]
        assert [run.wait() for run in runs] == [0, 0]
    assert server.requests == COUNT and set(server.request_counts.values()) == {1}
    outputs = {(tmp_path / name / "out/synthesized.jsonl").read_bytes() for name in ("one", "two")}
    assert len(outputs) == 1


def test_answers_are_reused_until_the_question_changes(project, tmp_path):
    with ScriptedServer(describe_image) as server:
        url = server.url
        synthesize(project, tmp_path, url)
        first = (tmp_path / "out/synthesized.jsonl").read_bytes()
        synthesize(project, tmp_path, url, question="What is it?")
        assert server.requests == 2 * COUNT
    summary = synthesize(project, tmp_path, url, concurrency=2, max_requests=1)
    assert (read_report(summary)["cached"], "server" in read_report(summary)) == (COUNT, False)
    assert (tmp_path / "out/synthesized.jsonl").read_bytes() == first


def test_only_images_without_an_answer_are_requested_again(project, tmp_path):
    troubles = {1: Reply(500), 2: caption(""), 3: caption("a b", "length"), 4: caption("", "content_filter")}
    images: dict[bytes, int] = {}

    def troubled(request):
        number = images.setdefault(request.image.tobytes(), len(images))
        return troubles.get(number) or describe_image(request)

    with ScriptedServer(troubled) as server:
        summary = synthesize(project, tmp_path, server.url)
        assert server.requests == COUNT + 1, "one was tried twice"
        assert read_report(summary)["unusable"] == {"cut off": 1, "empty": 1, "no answer": 1, "refused": 1}
        rows = list(read_jsonl(tmp_path / "out/synthesized.jsonl"))
        assert [row["text"] for row in rows if row["text"] in map(build_dj_text, CAPTIONS)] == [
            row["text"] for row in rows if "recaption" not in row
        ]
        assert sum("recaption" not in row for row in rows) == 4 and len(rows) == COUNT
        troubles.clear()
        summary = synthesize(project, tmp_path, server.url)
    assert server.requests == COUNT + 2 and read_report(summary)["captioned"] == 1
    assert read_report(summary)["unusable"] == {"cut off": 1, "empty": 1, "refused": 1}


def test_a_higher_budget_continues_a_stopped_stage(project, tmp_path):
    with ScriptedServer(describe_image) as server:
        for _ in range(2):
            with pytest.raises(InputError, match="max_requests: 7 is used up.*7 requests and 70 tokens so far, over"):
                synthesize(project, tmp_path, server.url, max_requests=7)
            assert server.requests == len(kept_captions(tmp_path)) == 7
        with pytest.raises(InputError, match="max_total_tokens: 100 is used up.*10 requests and 100 tokens so"):
            synthesize(project, tmp_path, server.url, max_total_tokens=100, concurrency=1)
        assert server.requests == 10
        synthesize(project, tmp_path, server.url, max_requests=COUNT)
    assert server.requests == COUNT and set(server.caption_counts.values()) == {1}


def test_two_steps_with_the_same_captions_are_refused(project, tmp_path):
    with ScriptedServer(describe_image) as server:
        settings = make_settings(project, tmp_path, server.url)
        mapper, *others = settings["recipe"]["process"]
        captioner = {"openai_captioning_mapper": {"base_url": f"{server.url}/", "model": MODEL, "max_requests": COUNT}}
        same = {"low_similarity_recaption_mapper": {"keep_fraction": 0.5, "captioner": captioner}}
        settings["recipe"]["process"] = [mapper, *others, same]
        with pytest.raises(
            InputError, match="openai_captioning_mapper is not allowed in a recipe, because it sends data"
        ):
            run_synthesis(project, tmp_path, settings)
        settings["trusted_recipes"] = True
        with pytest.raises(
            InputError, match="recipe, steps 1 and 4: low_similarity_recaption_mapper would send the same"
        ):
            run_synthesis(project, tmp_path, settings)
        assert server.requests == server.lists == 0
        captioner["openai_captioning_mapper"]["question"] = "What is it?"
        run_synthesis(project, tmp_path, settings)
    assert COUNT < server.requests < 2 * COUNT, "another question may be asked"


def test_a_missing_server_stops_the_stage_before_other_work(project, tmp_path):
    with ScriptedServer(describe_image, ["another"]) as server:
        with pytest.raises(InputError, match="does not list this model, but 'another'"):
            synthesize(project, tmp_path, server.url)
        url = server.url
    with pytest.raises(InputError, match=f"{url}.*Start the server"):
        synthesize(project, tmp_path, url)
    assert not list((tmp_path / "out").rglob("*.arrow")), "no row has been read"


def test_the_key_is_in_no_file_and_no_printed_line(project, tmp_path):
    with ScriptedServer(describe_image, key=KEY) as server:
        write_settings(project, tmp_path, server.url, key_variable=VARIABLE)
        without = subprocess.run(build_synthesis_command(project, tmp_path), capture_output=True, text=True)
        environment = os.environ | {VARIABLE: KEY}
        done = subprocess.run(
            build_synthesis_command(project, tmp_path), capture_output=True, text=True, env=environment
        )
    assert without.returncode == 2 and f"the server needs a key (401). Put one into {VARIABLE}" in without.stderr
    assert done.returncode == 0 and server.requests == COUNT
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 6 and not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in done.stdout + done.stderr


def test_only_one_process_sends_requests_on_ray(project, tmp_path, capfd):
    """The test needs no Ray, because these operators do not use it."""
    with ScriptedServer(describe_image) as server:
        write_settings(project, tmp_path, server.url, concurrency=2)
        settings = read_synthesize_settings(tmp_path / "config.yaml", tmp_path, None)
        arguments = settings.arguments["low_similarity_recaption_mapper"] | {"min_similarity": 10.0}
        import_rows(project / "data/pairs.jsonl", settings.image_root, tmp_path / "rows")
        [step] = parse_steps("recipe", [{"low_similarity_recaption_mapper": arguments}])
        [operator] = build_operators([step], tmp_path)
        chain = Chain([Step(1, operator)])
        [table] = engine._run_on_ray(chain, list_partitions(tmp_path / "rows"))
    assert table.num_rows == server.requests == COUNT and server.most_in_flight <= 2
    assert "note: low_similarity_recaption_mapper: runs in this process and not on Ray" in capfd.readouterr().err
    measuring = Chain([Step(1, operator, only_measures=True)])
    assert not measuring.in_one_process, "similarities are measured on Ray"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_url": "http://me:hunter2@host/v1"}, "synthesize.openai.base_url: must be an address"),
        ({"api_key": "hunter2"}, "synthesize.openai.api_key: unknown key"),
    ],
)
def test_configuration_with_secret_is_refused_and_not_printed(values, message):
    with pytest.raises(InputError) as caught:
        merge_experiment("baseline", {"synthesize": {"openai": values}})
    assert message in str(caught.value) and "hunter2" not in str(caught.value)
