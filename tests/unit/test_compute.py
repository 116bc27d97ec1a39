"""Seeds, threads, mixed precision, and environment variables of scripts that import PyTorch."""

import ast
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy
import pytest
import torch

from dj2mgm.compute import mixed_precision, set_seed, use_cpu_threads
from dj2mgm.script_modules import SCRIPTS

IMPORT_TORCH = {"torch", "transformers", "deepspeed", "peft", "accelerate", "torchao"}
VARIABLES = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "PYTORCH_CUDA_ALLOC_CONF"}


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


@cache
def list_imports(path: Path) -> list[str]:
    """Return the names that a script or module imports at module level, also those of imported objects.

    Imports inside `with torch_imports()` and `with project_imports()` do not count.
    """
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def imports_torch(path: Path, done: set[Path]) -> bool:
    """Return whether a script or module imports PyTorch at module level, directly or through the project's modules."""
    done.add(path)
    names = list_imports(path)
    if IMPORT_TORCH & {name.partition(".")[0] for name in names}:
        return True
    files = (SCRIPTS / f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py"))
    return any(file.is_file() and file not in done and imports_torch(file, done) for file in files)


def test_a_script_sets_the_environment_before_it_imports_torch():
    assert [path.name for path in sorted(SCRIPTS.glob("*.py")) if imports_torch(path, set())] == []


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, "300 None"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None ACTIVE")],
    ids=["default", "own policy"],
)
def test_the_users_own_variables_win(own, expected):
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    code = "import os; before = dict(os.environ); import dj2mgm.torch_environment as environment; "
    code += "assert before == os.environ, 'the import sets variables'; environment.set_torch_environment(); "
    code += "print(os.getenv('GOMP_SPINCOUNT'), os.getenv('OMP_WAIT_POLICY'))"
    environment = others | own | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == f"{expected}\n"
