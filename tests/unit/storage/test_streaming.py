"""Tools for more rows than fit in memory."""

import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from itertools import count, islice
from pathlib import Path

import psutil
import pytest

from dj2mgm.data.formats import build_conversation, build_dj_text, read_pairs
from dj2mgm.data.images import HeldOutImages
from dj2mgm.data.training_jsonl import convert_pairs, write_training_jsonl
from dj2mgm.data.user_dataset import write_user_dataset
from dj2mgm.juicer.partitions import ROWS_AT_ONCE
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.settings.dataset_files import FilesDataset
from dj2mgm.storage.files import write_json_list, write_jsonl
from dj2mgm.storage.streaming import ITEMS_AHEAD, DiskMap, end_with_parent, map_in_order
from paths import PROJECT
from sample_rules import build_sample_rules
from tiny_models import save_image


@pytest.mark.parametrize("processes", [1, 3])
def test_results_are_in_order_with_few_items_drawn_ahead(processes):
    drawn = []

    def items():
        for number in count():  # infinite, so that collecting all items would never end
            drawn.append(number)
            yield number

    results = map_in_order(lambda number: number**2, items(), processes)
    for taken, result in enumerate(islice(results, 100), start=1):
        assert result == (taken - 1) ** 2
        assert len(drawn) <= taken + ITEMS_AHEAD * processes
    results.close()


def test_exceptions_of_a_process_are_raised_in_the_parent():
    """All workers have ended by then, because Python's exit prints an error if they end during it."""
    children, threads = psutil.Process().children(), threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda number: 1 // number, [2, 1, 0, 1], 2))
    assert (psutil.Process().children(), threading.active_count()) == (children, threads)


def test_worker_processes_end_with_their_parent(tmp_path):
    """Otherwise, the workers of a killed parent would wait forever, and `tee` for them."""
    program = (
        "import itertools; from dj2mgm.storage import streaming as s; list(s.map_in_order(abs, itertools.count(), 2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT / "workflow_scripts", stdout=subprocess.PIPE)
    while len(workers := psutil.Process(parent.pid).children()) < 2:
        time.sleep(0.05)
    parent.kill()
    assert parent.stdout.read() == b""  # until no process has the pipe open
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_a_process_with_a_dead_parent_ends():
    # the process's parent has another id
    status = os.waitpid(_forked(lambda: end_with_parent(parent=os.getpid())), 0)[1]
    assert os.waitstatus_to_exitcode(status) == 1
    parent = os.getpid()
    assert os.waitstatus_to_exitcode(os.waitpid(_forked(lambda: end_with_parent(parent)), 0)[1]) == 0


def _forked(function) -> int:
    child = os.fork()
    if not child:
        function()
        os._exit(0)
    return child


def test_a_map_on_disk_behaves_like_a_dictionary():
    rng = random.Random(0)
    dictionary, on_disk = {}, DiskMap()
    for _ in range(3000):
        key, value = f"é{rng.randrange(400)}", rng.choice([rng.randrange(2**40), "text", ""])
        match rng.randrange(4):
            case 0:
                assert on_disk.setdefault(key, value) == dictionary.setdefault(key, value)
            case 1:
                on_disk.replace([(key, value)])
                dictionary[key] = value
            case 2:
                on_disk.fill([(key, value)])
                dictionary.setdefault(key, value)
            case 3:
                assert on_disk.get(key) == dictionary.get(key) and (key in on_disk) == (key in dictionary)


def write_pairs(folder: Path, rows: int) -> Path:
    save_image(folder / "a.png")
    pairs = ({"id": f"r{n}", "text": build_dj_text(f"a picture, number {n}"), "images": ["a.png"]} for n in range(rows))
    write_jsonl(folder / "pairs.jsonl", pairs)
    return folder / "pairs.jsonl"


def filtered(data: Path) -> None:
    process = [{"text_length_filter": {"min_len": 1}}, {"image_text_deduplicator": None}]
    run_recipe(RecipeSettings(data.parent, 1, parse_steps("recipe", process)), data, data.parent / "out", FILTERED)


def written(data: Path) -> None:
    rules = build_sample_rules(max_samples=10**9)
    rows = convert_pairs(read_pairs(data), "")
    write_training_jsonl(rows, data.parent, HeldOutImages(), data.parent / "out/pretrain.jsonl", rules, processes=1)


def run_stage(data: Path) -> None:
    talks = (build_conversation(row["id"], row["images"][0], "What?", "a picture") for row in read_pairs(data))
    write_json_list(data.parent / "talks.json", talks)
    save_image(data.parent / "x.png", (1, 1, 1))
    save_image(data.parent / "y.png", (2, 2, 2))
    held_out = [{"id": name, "image": f"{name}.png", "captions": ["a picture"]} for name in "xy"]
    write_jsonl(data.parent / "held_out.jsonl", held_out)
    files = {"pretrain": data, "finetune": data.parent / "talks.json", "evaluation": data.parent / "held_out.jsonl"}
    splits = {split: {"file": str(file), "images": str(data.parent)} for split, file in files.items()}
    write_user_dataset(FilesDataset.model_validate(splits), data.parent / "out")


@pytest.mark.parametrize("stage", [run_stage, filtered, written])
def test_a_stages_memory_does_not_grow_with_rows(tmp_path, stage, monkeypatch):
    monkeypatch.setattr("dj2mgm.juicer.partitions.PARTITION_ROWS", ROWS_AT_ONCE)
    monkeypatch.setattr("dj2mgm.storage.streaming.CHUNK_CHARACTERS", 10_000)
    highest = {}
    stage(write_pairs(tmp_path / "few", 10))  # imports and caches are not counted
    for partitions in (1, 3):
        data = write_pairs(tmp_path / str(partitions), partitions * ROWS_AT_ONCE)
        tracemalloc.start()
        stage(data)
        highest[partitions] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert highest[3] < 1.15 * highest[1]


@pytest.mark.slow
def test_benchmark_by_rows_uses_baseline_settings(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    monkeypatch.chdir(PROJECT)
    import data_scale

    monkeypatch.setattr(data_scale, "DRAWN", 60)
    monkeypatch.setattr(sys, "argv", f"data_scale.py --rows 50 --executors default --folder {tmp_path}".split())
    data_scale.main()
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| make_dataset", "50"], ["| filter, default", "50"], ["| jsonl", "50"]]


def test_numbers_in_a_map_on_disk_are_summed():
    numbers = DiskMap()
    numbers.add([("a", 1), ("b", 2)])
    numbers.add([("a", 5)])
    assert (numbers.get("a"), numbers.get("b"), numbers.get("c")) == (6, 2, None)
