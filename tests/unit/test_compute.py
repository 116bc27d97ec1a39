import ast
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from dj2mgm.code import SCRIPTS
from dj2mgm.compute import mixed_precision, set_seed, use_cpu_threads

IMPORT_TORCH = {"torch", "transformers", "deepspeed", "peft"}


def draw() -> tuple:
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_a_seed_fixes_all_three_generators():
    set_seed(3)
    first = draw()
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert not set(draw()) & set(first)


def test_threads_default_to_the_cores_the_process_may_use(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    try:
        assert use_cpu_threads(None) == len(os.sched_getaffinity(0)) == torch.get_num_threads()
        assert use_cpu_threads(1) == torch.get_num_threads() == 1
        assert os.environ["OMP_NUM_THREADS"] == "1"
    finally:
        torch.set_num_threads(before)


def test_mixed_precision_uses_bf16_if_supported():
    with mixed_precision(torch.device("cpu")):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    fast = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert product.dtype == (torch.bfloat16 if fast else torch.float32)


def imported_packages(script: Path) -> list[str]:
    """Return the top-level imports of a script in order, without submodules."""
    names: list[str] = []
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name.partition(".")[0] for name in names]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_sets_how_openmp_waits_before_it_imports_torch(script):
    imported = [name for name in imported_packages(script) if name in IMPORT_TORCH | {"dj2mgm"}]
    assert imported[0] == "dj2mgm"


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "300 None"), ({"GOMP_SPINCOUNT": "5"}, "5 None"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE")],
    ids=["default", "own count", "own policy"],
)
def test_the_users_own_variables_win(own, expected):
    others = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import dj2mgm, os; print(os.getenv('GOMP_SPINCOUNT'), os.getenv('OMP_WAIT_POLICY'))"
    environment = others | own | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == f"{expected}\n"
