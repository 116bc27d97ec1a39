"""Counts of the explorer agree with the run, and its server rejects requests without the token."""

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from html import unescape
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, quote, urlsplit

import numpy as np
import pytest
from PIL import ExifTags, Image

import explore
from dj2mgm.errors import InputError
from dj2mgm.features.explorer import explorer_page
from dj2mgm.features.explorer.explorer_page import Explorer, Server, build_served_page, write_explorers
from dj2mgm.features.explorer.results import Results, read_results
from dj2mgm.features.explorer.row_table import RowTable, TextFile, compute_limit
from dj2mgm.recipes.catalogue import OPERATOR_STATISTICS, label_statistic
from dj2mgm.records import describe_clip_doubt
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.rendering import build_step_key, locate_explorer_page
from dj2mgm.reporting.report_page import write_report_page
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.storage.files import read_json, read_jsonl, write_json, write_jsonl, write_yaml
from drawn_datasets import draw_dataset
from explorer_results import MARKUP, format_row_id, write_run
from report_results import FILTER_RECIPE, SYNTHESIS_RECIPE, write_results
from run_main import run_main

ROWS = 3000


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("explorer ä") / "results", ROWS)


@pytest.fixture(scope="module")
def results(run) -> Results:
    return read_results(run)


def test_limits_reproduce_the_runs_dropped_rows(results, run):
    """Rows have values at open and closed interval ends, Data-Juicer's defaults, and limits by share."""
    pairs = results.tables[0]
    for stage in ("filter", "synthesize"):
        summary = read_json(run / stage / "summary.json")
        of_stage = [step for step in pairs.steps if step.stage == stage]
        assert [(s.operator, s.dropped) for s in of_stage] == [
            (s["operator"], s["dropped"]) for s in summary["operators"]
        ]
    numbers = {key: column.values for key, column in pairs.columns.items()}
    for index, step in enumerate(pairs.steps, start=1):
        arrived = (pairs.fate == 0) | (pairs.fate >= index)
        has_numbers = arrived.copy()
        for limit in step.limits:
            has_numbers &= np.isfinite(numbers[limit.column])
        dropped = np.zeros(ROWS, dtype=bool)
        for limit in step.limits:
            dropped |= limit.drops(numbers[limit.column], compute_limit(limit, limit.value, numbers, arrived))
        if step.rewritten is not None:
            assert dropped.sum() == step.rewritten > 0
        elif step.limits:
            assert (dropped[has_numbers] == (pairs.fate[has_numbers] == index)).all()
    limits = {f"{step.operator} {limit.argument}": limit.value for step in pairs.steps for limit in step.limits}
    assert limits == {
        "text_length_filter min_len": 38,
        "text_length_filter max_len": 90,
        "alphanumeric_filter min_ratio": 0.4,
        "alphanumeric_filter max_ratio": None,
        "image_shape_filter min_width": 32,
        "image_shape_filter max_width": 640,
        "image_shape_filter min_height": 32,
        "image_shape_filter max_height": None,
        "image_aspect_ratio_filter min_ratio": 0.5,
        "image_aspect_ratio_filter max_ratio": 3.0,
        "image_size_filter min_size": 1024,
        "image_size_filter max_size": 20 * 2**20,
        "image_near_deduplicator max_bits": 8,
        "low_similarity_recaption_mapper keep_fraction": 0.5,
        "batched_image_text_similarity_filter keep_fraction": 0.5,
        "batched_image_text_similarity_filter max_score": 1.0,
        "caption_log_likelihood_filter min_log_likelihood": -3.0,
    }


@pytest.mark.parametrize(
    ("clip", "root", "is_doubtful"),
    [
        ("results/foundation/tiny/clip", "results/datasets/mine/sources.json", True),
        ("results/foundation/tiny/clip", "/data/photos", True),
        ("results/foundation/tiny/clip", "results/datasets/shapes", False),
        ("model_zoo/clip-vit-large-patch14-336", "/data/photos", False),
        (None, "/data/photos", False),
    ],
)
def test_similarities_by_the_embedded_clip_are_doubtful(clip, root, is_doubtful):
    assert bool(describe_clip_doubt(clip, root)) == is_doubtful


def test_statistics_have_plain_labels_with_units():
    used = {name for names in OPERATOR_STATISTICS.values() for name in names}
    assert {name for name in used if label_statistic(name) == name.replace("_", " ")} == {"perplexity"}
    assert label_statistic("my_own") == "my own"


def test_steps_that_limits_cannot_reproduce_have_no_slider(tmp_path):
    run = write_run(tmp_path / "results", 200, several=False)
    file = run / "filter/config.yaml"
    file.write_text(file.read_text().replace("min_len: 38", "min_len: 45"))
    steps = {step.operator: step for step in read_results(run).tables[0].steps}
    assert steps["text_length_filter"].limits == []
    assert len(steps["image_shape_filter"].limits) == 4


def test_rows_show_near_duplicates_and_rewritten_captions(results):
    pairs, captions, answers = results.tables
    lines = [row["lines"] for row in pairs.texts]
    after = "after low_similarity_recaption_mapper"
    rewritten = [row for row, part in enumerate(lines) if any(label == after for label, _ in part)]
    column = pairs.columns["caption"]
    assert rewritten == np.flatnonzero(column.values == column.words.index("rewritten")).tolist()
    assert all(lines[row][0][0] == "before" and [after, f"new caption {row}"] in lines[row] for row in rewritten)
    clusters, distances = pairs.columns["cluster"].values, pairs.columns["distance"].values
    assert len(np.unique(clusters[np.isfinite(clusters)])) == 2
    assert np.isfinite(distances).sum() == np.isfinite(clusters).sum() > 10
    assert captions.columns["clip_score"].values.tolist() == list(range(20))
    verdict = answers.columns["verdict"]
    assert [verdict.words[int(code)] for code in verdict.values[:5]] == ["wrong", *["right"] * 3, "wrong"]
    assert answers.first_filter == {"verdict": "wrong"}


def test_captions_of_one_image_have_its_scores(tmp_path):
    run = write_run(tmp_path / "results", 50)
    file = run / "generate/captions.jsonl"
    rows = [row | ({"image_id": "e1"} if row["id"] == "e2" else {}) for row in read_jsonl(file)]
    write_jsonl(file, rows)
    scores = [row for row in read_jsonl(run / "evaluate_clip/scores.jsonl") if row["id"] != "e2"]
    scores[1]["values"] = {"clip_score": [3.0, 2]}
    write_jsonl(run / "evaluate_clip/scores.jsonl", scores)
    _, captions, _ = read_results(run).tables
    assert captions.columns["clip_score"].values[:4].tolist() == [0, 1.5, 1.5, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.parents[1], "is not a folder of results"),
        (lambda run: run.parent / "datasets", "is not a folder of results|contains no stage|is missing"),
        (lambda run: run / "none", "is not a folder of results"),
        (lambda run: run / "filter", "is one stage of a run; name its parent, results/run"),
        (lambda run: (run / "filter/summary.json").unlink() or run, r"run the rule filter_data first"),
        (lambda run: (run / "synthesize/summary.json").unlink() or run, "run the rule synthesize_captions first"),
        (lambda run: write_jsonl(run / "filter/stats.jsonl", [{"id": "other"}]) and run, "'other', which is missing"),
    ],
)
def test_unusable_folders_are_reported_in_one_sentence(tmp_path, change, message):
    run = write_run(tmp_path / "results", 60)
    folder = change(run)
    with pytest.raises(InputError, match=message):
        read_results(folder)


def test_a_page_is_written_to_an_existing_folder(run, tmp_path, capsys):
    for output in (tmp_path / "none/page.html", tmp_path):
        done = run_main(explore, str(run), "--output", str(output), capture=capsys)
        assert (done.status, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "name a file in an existing folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_is_explored_with_and_without_analysis(tmp_path):
    run = write_run(tmp_path / "results", 300, several=False)
    dataset = run.parent / "datasets/drawn"
    write_yaml(dataset / "config.yaml", draw_dataset(0, 2, 1, 2).file_content())
    read = read_results(dataset)
    plain, held_out = read.tables
    assert (len(plain), plain.steps, plain.image_root) == (300, [], dataset)
    evaluation = [row["id"] for row in read_jsonl(dataset / "evaluation.jsonl")]
    assert [row["id"] for row in held_out.texts] == evaluation != [] and held_out.image_root == dataset
    assert "<h1>drawn</h1>" in build_served_page(read), "a dataset has no origin"
    stats = [{"id": format_row_id(row), "text_len": 30 + row % 50} for row in range(300)]
    write_jsonl(dataset / "analyze/stats.jsonl", stats)
    write_json(dataset / "analyze/summary.json", {})
    recipe = {"process": [{"image_integrity_filter": None}, {"text_length_filter": {"min_len": 40, "max_len": 60}}]}
    write_yaml(dataset / "analyze/config.yaml", {"image_root": "results/datasets/drawn", "recipe": recipe})
    analysed, _ = read_results(dataset).tables
    [step] = analysed.steps
    assert (step.operator, step.dropped) == (
        "text_length_filter",
        sum(not 40 <= row["text_len"] <= 60 for row in stats),
    )


@pytest.fixture(scope="module")
def server(results):
    server = Server(Explorer([results], {"report.html": b"<p>report"}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def request_page(
    server: Server, path: str, token: str | None = None, host: str | None = None
) -> tuple[int, bytes, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    start = "" if token == "" else f"/{server.token if token is None else token}"
    connection.putrequest("GET", f"{start}/{path}", skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


@pytest.mark.parametrize("host", ["localhost.evil.org", "127.0.0.1"])
def test_another_host_or_a_wrong_token_is_refused(server, host):
    assert request_page(server, "explorer/run.html")[0] == 200
    assert request_page(server, "explorer/run.html", host=host)[0] == 403
    for token in ("", "x", server.token[:-1], server.token + "x"):
        assert request_page(server, "explorer/run.html", token=token)[0] == 403
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/passwd",
        "run/pairs/image?at=../../etc/passwd&side=160",
        "run/pairs/image?at=images/1.jpg&side=160",
        "run/pairs/image?at=-1&side=160",
        f"run/pairs/image?at={ROWS}&side=160",
        "run/pairs/image?at=1&side=100000",
        "run/pairs/image?at=1&side=160&root=/etc",
        "run/pairs/image",
        "run/pairs/texts",
        "run/../pairs/image?at=1&side=160",
        "datasets/drawn/images/1.jpg",
        "run/pairs/rows?at=1,x",
        "run/pairs/rows?at=%C2%B2",
    ],
)
def test_only_rows_are_served(server, path):
    assert request_page(server, path)[0] == 404


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=5)


def test_connections_without_a_complete_request_are_closed(server, monkeypatch):
    monkeypatch.setattr("dj2mgm.features.explorer.explorer_page.REQUEST_S", 0.3)
    silent, dripping, persistent = connect(server), connect(server), http.client.HTTPConnection(*server.server_address)
    persistent.request("GET", f"/{server.token}/report.html")
    assert persistent.getresponse().read()
    dripping.sendall(b"GET /x HTTP/1.1\r\n")
    started = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - started < 4:
            dripping.sendall(b"X")
            time.sleep(0.05)
    assert time.monotonic() - started < 3, "a request that drips has no deadline"
    assert silent.recv(1) == b"" and persistent.sock.recv(1) == b""
    while server.open and time.monotonic() - started < 5:
        time.sleep(0.01)
    assert not server.open


def test_too_many_connections_are_refused(server, monkeypatch):
    monkeypatch.setattr("dj2mgm.features.explorer.explorer_page.MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as stack:
        open_ones = [stack.enter_context(connect(server)) for _ in range(3)]
        for number, connection in enumerate(open_ones):
            connection.sendall(b"GET /x HTTP/1.1\r\n")
            while len(server.open) <= number:
                time.sleep(0.01)
        refused = stack.enter_context(connect(server))
        assert refused.recv(1) == b""
        open_ones[0].close()
        while len(server.open) == 3:
            time.sleep(0.01)
        assert request_page(server, "report.html")[0] == 200


def test_images_are_scaled_and_a_missing_one_is_explained(server):
    status, content, headers = request_page(server, "run/pairs/image?at=3&side=160")
    assert status == 200 and headers["Content-Type"] == "image/webp" and content[8:12] == b"WEBP"
    status, content, headers = request_page(server, "run/pairs/image?at=2&side=160")
    assert status == 200 and headers["Content-Type"] == "image/svg+xml" and b"missing" in content


def test_a_damaged_image_is_called_damaged(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"not an image")
    kind, content = Explorer._read_image(tmp_path, "a.jpg", 160)
    assert kind == "image/svg+xml" and b">damaged<" in content
    texts = TextFile()
    texts.add({"id": "a", "lines": [], "image": "a.jpg"})
    texts.finish()
    assert dict(explorer_page._encode_images(RowTable("pairs", "Pairs", tmp_path, texts, {}))) == {0: "damaged"}


def test_images_are_turned_by_their_orientation(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (20, 10)).save(tmp_path / "lying.jpg", exif=exif)
    _, content = Explorer._read_image(tmp_path, "lying.jpg", 160)
    assert Image.open(BytesIO(content)).size == (10, 20)


def test_requests_for_rows_and_searches_are_answered(server):
    [row] = json.loads(request_page(server, "run/pairs/rows?at=1")[1])
    assert row["id"] == format_row_id(1) and row["lines"][0][1] == MARKUP
    matches = np.frombuffer(
        request_page(server, f"run/pairs/find?words={format_row_id(7)[:-1].upper()}")[1], dtype=np.uint8
    )
    assert np.flatnonzero(matches)[:10].tolist() == list(range(10))  # and their near-duplicates
    name = row["image"].rpartition("/")[2]
    name_matches = np.frombuffer(request_page(server, f"run/pairs/find?words={name.upper()}")[1], dtype=np.uint8)
    assert 1 in np.flatnonzero(name_matches)
    assert request_page(server, "report.html")[1] == b"<p>report"
    policy = request_page(server, "report.html")[2]["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert request_page(server, "report%2Ehtml")[2]["Content-Security-Policy"] == policy


@pytest.mark.parametrize("name", ["a#b?", "a%41b", "照片"])
def test_a_name_that_needs_quoting_in_urls_is_served(results, name):
    server = Server(Explorer([Results(name, results.tables[:1], "")], {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = server.build_address(locate_explorer_page(name)).removeprefix(
        f"http://127.0.0.1:{server.server_port}/{server.token}/"
    )
    assert page.isascii() and request_page(server, page)[0] == 200
    assert request_page(server, f"{quote(name)}/pairs/rows?at=1")[0] == 200
    server.shutdown()
    server.server_close()


def test_invalid_address_is_a_bad_request(server, capfd):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
        client.sendall(f"GET http://[/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 400"
    assert capfd.readouterr().err == ""


def test_taken_port_is_reported(server, results):
    with pytest.raises(InputError, match=f"port {server.server_port} cannot be opened"):
        Server(Explorer([results], {}), server.server_port)
    with pytest.raises(InputError, match="port 70000 cannot be opened"):
        Server(Explorer([results], {}), 70000)
    with pytest.raises(InputError, match="2 of the folders are named run"):
        Explorer([results, results], {})


def test_pages_are_written_with_a_report_unless_they_are_large(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])  # paths in results are relative to this folder
    stages = {path.name: path for path in run.iterdir() if path.is_dir()}
    cases = [("small", ROWS, stages), ("large", 1_000_000, stages), ("empty", ROWS, {"filter": tmp_path})]
    entries = [
        SimpleNamespace(name=name, dataset=tmp_path / name, runs=[SimpleNamespace(stages=folders)])
        for name, _, folders in cases
    ]
    for name, rows, _ in cases:
        write_json(tmp_path / name / "summary.json", {"pretrain": rows})
    monkeypatch.setattr(explorer_page, "load_settings", lambda *arguments: SimpleNamespace(experiments=entries))
    write_explorers(tmp_path / "config.yaml", tmp_path / "explorer")
    assert [path.name for path in (tmp_path / "explorer").iterdir()] == ["small.html"]
    notes = capsys.readouterr().err
    assert "note: the report has no explorer's page of large" in notes
    assert "note: the explorer's page of empty is not written: " in notes
    page = (tmp_path / "explorer/small.html").read_text(encoding="utf-8")
    assert "<title>small: explorer of drawn</title>" in page and 'name="table" value="answers"' in page


def test_links_of_the_report_exist_in_the_explorer(tmp_path):
    """Each link of a report names a filter of the explorer's page of the same results."""
    page = tmp_path / "report.html"
    experiments = load_experiments(write_results(tmp_path / "results"))
    write_report_page(Assessment(experiments), page)
    assert "explorer/" not in page.read_text(), "without pages of the explorer, there are no links to them"
    write_report_page(Assessment(experiments), page, ["baseline", "dj_synth"])
    links = re.findall(r'href="(explorer/[^"]+)"', page.read_text())
    fragments = [parse_qs(urlsplit(unescape(link)).fragment) for link in links]
    recipes = {"filter": FILTER_RECIPE["process"], "synthesize": SYNTHESIS_RECIPE["process"]}
    step_keys = {
        build_step_key(stage, number) for stage, steps in recipes.items() for number in range(1, len(steps) + 1)
    }
    drops = [fragment["drop"][0] for fragment in fragments if "drop" in fragment]
    assert {"filter-2", "filter-4", "synthesize-2", "synthesize-3"} == set(drops) & step_keys == set(drops)
    assert {key for fragment in fragments for key in fragment} == {"drop", "caption", "table", "find", "verdict"}
