"""Diagnoses of the logs in tests/fixtures/logs, which resemble those of real machines, and of killed processes.

A near miss is a log that shares words with a failure but has another failure or none.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dj2mgm.divergence import make_divergence_error
from dj2mgm.health.diagnosis import SIGNATURES, find_cause
from dj2mgm.health.failure_signature import read_log
from dj2mgm.health.gpu_failures import TrainingStage, name_tensor
from dj2mgm.health.system_failures import OomKill, describe_kill, parse_kernel_log, read_kernel_kills
from dj2mgm.monitoring.memory_files import CgroupLimits
from dj2mgm.script_modules import SCRIPTS, find_modules
from forked_python import forked_python
from markdown_links import build_anchor
from paths import PROJECT

LOGS = PROJECT / "tests" / "fixtures" / "logs"
MIB, GIB = 2**20, 2**30
SHM, KILLED = "Shared memory is full", "Killed with signal 9"


def title(text: str, tmp_path: Path) -> str | None:
    path = tmp_path / "stage.log"
    path.write_text(text, encoding="utf-8")
    diagnosis = find_cause(read_log(path))
    return diagnosis and diagnosis.signature.title


def logged(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: build_anchor(signature.title))
def test_failure_is_found_in_its_log_but_not_in_a_near_miss(signature):
    diagnosis = find_cause(read_log(LOGS / f"{build_anchor(signature.title)}.log"))
    assert diagnosis.signature.title == signature.title
    lines = [line.split(":")[0].strip() for line in str(diagnosis).splitlines() if re.match(r"  \w", line)]
    assert lines == ["cause", "evidence", "remedy"]
    assert diagnosis.explanation.cause and diagnosis.explanation.remedy
    assert "{" not in str(diagnosis.explanation)
    near_miss = find_cause(read_log(LOGS / f"{build_anchor(signature.title)}.near-miss.log"))
    assert near_miss is None or near_miss.signature.title != signature.title
    assert f" | {signature.title} | " in (PROJECT / "docs/troubleshooting.md").read_text(encoding="utf-8")


def test_each_title_has_one_pair_of_logs():
    names = {build_anchor(signature.title) for signature in SIGNATURES}
    assert len(names) == len(SIGNATURES)
    expected = {f"{name}{kind}.log" for name in names for kind in ("", ".near-miss")}
    assert {path.name for path in LOGS.glob("*.log")} == expected


def test_near_misses_are_diagnosed_as_other_failures_or_none():
    """Three have another diagnosis: out of memory without fragments, and crashes that are no kills or full memory."""
    seen = {path.name: find_cause(read_log(path)) for path in LOGS.glob("*.near-miss.log")}
    titles = {name: diagnosis.signature.title for name, diagnosis in seen.items() if diagnosis}
    assert titles == {
        "gpu-memory-is-fragmented.near-miss.log": "CUDA out of memory",
        "shared-memory-is-full.near-miss.log": "Crash in a library",
        "killed-with-signal-9.near-miss.log": "Crash in a library",
    }


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("cuda-out-of-memory", "nccl-time-out"),
        ("cpu_adam-could-not-be-built", "deepspeedcpuadam-has-no-attribute-ds_opt_adam"),
        ("the-disk-is-full", "killed-with-signal-9"),
        ("an-image-cannot-be-read", "nccl-time-out"),
        ("cuda-out-of-memory", "the-disk-is-full"),
        ("waiting-on-a-stale-build-lock", "stopped-from-outside"),
    ],
)
def test_first_failure_in_a_log_is_the_cause(tmp_path, first, then):
    [expected] = [signature.title for signature in SIGNATURES if build_anchor(signature.title) == first]
    assert title(logged(first) + logged(then), tmp_path) == expected


@pytest.mark.parametrize("symptom", ["killed-with-signal-9", "nccl-time-out", "the-loss-is-not-a-number"])
def test_cause_precedes_earlier_symptom(tmp_path, symptom):
    assert title(logged(symptom) + logged("the-disk-is-full"), tmp_path) == "The disk is full"


def test_cause_precedes_earlier_clean_up_of_optimizer(tmp_path):
    text = logged("deepspeedcpuadam-has-no-attribute-ds_opt_adam") + logged("cuda-toolkit-and-torch-do-not-match")
    assert title(text, tmp_path) == "CUDA toolkit and torch do not match"


def test_evidence_is_the_first_line_with_its_number():
    explanation = find_cause(read_log(LOGS / "cpu_adam-could-not-be-built.log")).explanation
    assert "/usr/bin/ld: cannot find -lcurand" in explanation.cause
    assert "CUDA toolkit" in explanation.remedy
    diagnosis = str(find_cause(read_log(LOGS / "killed-with-signal-9.log")))
    assert "  evidence: line 7: [2026-03-02 10:16:27,885] [ERROR]" in diagnosis


def test_failures_are_found_among_colors_and_progress_bars(tmp_path):
    text = "\r 3%|▎ | 1/40\r 5%|▌ | 2/40\x1b[31mOSError: [Errno 28] No space left on device: 'a.pt'\x1b[0m\n"
    assert title(text, tmp_path) == "The disk is full"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Error while creating shared memory segment /dev/shm/nccl-k (size 9), error: No space left on device (28)",
            SHM,
        ),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_12'", SHM),
        ("E1128 3:10 api.py:984] failed (exitcode: -9) local_rank: 1 (pid: 4251) of binary: python", KILLED),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=8.batch. Some of the step tasks", KILLED),
        ("slurmstepd: error: *** STEP 812348.0 ON gpu07 CANCELLED AT 2026-03-01T02:03:04 ***", "Stopped from outside"),
        ("slurmstepd: error: *** JOB 1 ON a CANCELLED AT 2026-03-01T02 DUE TO PREEMPTION ***", "Stopped from outside"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=88, GPU has fallen off the bus.", "The GPU is faulty"),
        ("exits with return code = -11", "Crash in a library"),
        ("OSError: [Errno 98] Address already in use", "Another training holds the port"),
        ("unable to open shared memory object </torch_1_2> in read-write mode: No space left on device (28)", SHM),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026 ***\nsrun: error: n1: task 0: Out Of Memory", KILLED),
        ("slurmstepd: error: *** JOB 1 ON a CANCELLED AT 2026 DUE TO NODE FAILURE ***", "Stopped from outside"),
        ("OSError: [Errno 28] 设备上没有空间: '/data/a.pt'", "The disk is full"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0", "CUDA out of memory"),
        ("Volatile uncorrectable ECC errors: 0", None),
        ("tensorboard: Address already in use, trying 6007", None),
    ],
)
def test_other_forms_of_a_failure_are_recognized(line, expected, tmp_path):
    assert title(f"step 12/400  loss 2.3\n{line}\n", tmp_path) == expected


def test_a_kill_by_the_scheduler_names_the_job_s_request(tmp_path):
    (tmp_path / "stage.log").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=8.batch.\n")
    explanation = find_cause(read_log(tmp_path / "stage.log")).explanation
    assert "all memory that it requested" in explanation.cause and "mem_mb" in explanation.remedy


def test_a_full_disk_is_compared_with_the_free_space(tmp_path, monkeypatch):
    (tmp_path / "stage.log").write_text(f"OSError: [Errno 28] No space left on device: '{tmp_path}/a.pt'\n")
    system = dict(f_bavail=100 * GIB // 4096, f_frsize=4096, f_files=10, f_favail=5)
    for change, message in (
        ({}, "has 100.0 GiB free now. So it was full for some time only"),
        ({"f_bavail": 10}, f"The file system of {tmp_path} has 0.0 GiB free"),
        ({"f_favail": 0}, "has no inodes left"),
    ):
        monkeypatch.setattr(os, "statvfs", lambda folder, values=system | change: SimpleNamespace(**values))
        assert message in find_cause(read_log(tmp_path / "stage.log")).explanation.cause


IGNORED = """Exception ignored in: <function Writer.__del__ at 0x7f82abc1d8a0>
Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/writer.py", line 60, in __del__
    self.flush()
OSError: [Errno 28] No space left on device
"""


def test_errors_that_python_ignores_are_no_cause(tmp_path):
    assert title(IGNORED, tmp_path) is None
    short = "ValueError: wrong\nERROR: Exception ignored in: <_io.TextIOWrapper name=1>\nOSError: [Errno 28] No space"
    assert title(f"{short} left on device\n", tmp_path) is None
    assert title(f"{IGNORED}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", tmp_path) == (
        "CUDA out of memory"
    )
    assert title(
        f"{IGNORED}Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n", tmp_path
    ) == ("The disk is full")


# numbers in a log


def test_500_mib_are_logits_of_gemma_for_1024_tokens():
    assert 1024 * 256000 * 2 == 500 * MIB
    explanation = find_cause(read_log(LOGS / "cuda-out-of-memory.log")).explanation
    assert (
        "500.00 MiB is the size of the logits of 1024 tokens: 1024 × 256000 (Gemma's vocabulary)" in explanation.cause
    )
    assert "0.3 GiB of 23.7 GiB were free" in explanation.cause


def test_logits_are_recognized_by_model_and_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stage, model = tmp_path / "results/baseline/finetune", tmp_path / "results/models/mgm-2b/mgm"
    stage.mkdir(parents=True)
    model.mkdir(parents=True)
    (stage / "config.yaml").write_text("micro_batch_size: 3\nmax_length: 341\n")
    (model / "config.json").write_text('{"text_config": {"vocab_size": 151936}}')
    # 3 × 341 × 151936 × 2, in blocks of 2 MiB
    text = logged("cuda-out-of-memory").replace("500.00", "298.00").replace("341.87 MiB", "41.87 MiB")
    (stage / "finetune.log").write_text(text)
    explanation = find_cause(read_log(stage / "finetune.log")).explanation
    assert "1023 × 151936 (this model's vocabulary) × 2 bytes (bf16)" in explanation.cause
    assert "Now finetune.micro_batch_size is 3, max_length 341" in explanation.remedy


@pytest.mark.parametrize(
    ("requested", "stage"),
    [
        (22 * MIB, TrainingStage("finetune")),
        (498 * MIB, TrainingStage("finetune")),  # one block less than 1024 tokens
        (500 * MIB, TrainingStage("finetune", vocabulary=50272)),  # another model
    ],
)
def test_tensor_of_ambiguous_size_is_not_named(requested, stage):
    assert name_tensor(requested, stage) is None


def test_other_processes_on_the_gpu_are_reported(tmp_path):
    text = logged("cuda-out-of-memory").replace(
        "Including non-PyTorch memory, this",
        "Process 608946 has 14.91 GiB memory in use. Including non-PyTorch memory, this",
    )
    path = tmp_path / "finetune.log"
    path.write_text(text)
    explanation = find_cause(read_log(path)).explanation
    assert "Other processes held 14.9 GiB of this GPU" in explanation.cause
    assert "doctor.py" in explanation.remedy


# real failures and the script

FAILURES = {
    "The disk is full": "print('x' * 2**20, file=open('/dev/full', 'w'))",
    "A relative path leads nowhere": "open('images/1.png')",
    "An image cannot be read": """
import sys
from torch.utils.data import DataLoader
from dj2mgm.data.images import load_image
class Images(list):
    def __getitem__(self, index):
        return load_image(sys.executable)
list(DataLoader(Images([1]), num_workers=1))
""",
}


@pytest.mark.parametrize("expected", FAILURES)
def test_real_failure_is_diagnosed_from_output_of_python(tmp_path, expected):
    python = forked_python() if "torch" in FAILURES[expected] else sys.executable
    command = [python, "-c", FAILURES[expected]]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode and title(done.stderr, tmp_path) == expected


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_{}, ({}, {}))\n"
AS_NOBODY = "import os; open('secret', 'w').close(); os.chmod('secret', 0); os.getuid() or os.setuid(65534)\n"
LOADER = """
from torch.utils.data import DataLoader
import torch
if __name__ == "__main__":
    loader = DataLoader([torch.zeros(3)] * 400, num_workers=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    kept = [batch for batch in loader]
"""
STALE = """
import ctypes, os
libc, mount = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
handle = (ctypes.c_char * 200)()
handle[0:4] = (128).to_bytes(4, "little")
open("gone", "w").close()
libc.name_to_handle_at(-100, b"gone", handle, ctypes.byref(mount), 0)
folder = os.open(".", os.O_RDONLY)
os.unlink("gone")
libc.open_by_handle_at(folder, handle, 0)
raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "gone")
"""
SYSTEM_FAILURES = [  # real messages about limits and faults of the system
    (
        "A file is too large",
        LIMIT.format("FSIZE", 1000, 1000) + "file = open('a', 'w')\nfile.write('x' * 5000)\nfile.flush()",
    ),
    (
        "A file is too large",
        "import numpy\nfrom safetensors.numpy import save_file\n"
        + LIMIT.format("FSIZE", 1000, 1000)
        + "save_file({'a': numpy.zeros(5000)}, 'a.safetensors')",
    ),
    ("Too many open files", LIMIT.format("NOFILE", 20, 20) + "kept = [open('/dev/null') for _ in range(30)]"),
    pytest.param("Too many open files", "import resource\n" + LOADER, marks=pytest.mark.slow),
    ("Permission denied", AS_NOBODY + "open('secret')"),
    ("A disk has a fault", "open('/proc/self/mem', 'rb').read(1)"),
    ("Main memory is used up", LIMIT.format("AS", 2**30, 2**30) + "bytearray(2**31)"),
    ("Main memory is used up", "import numpy\n" + LIMIT.format("AS", 2**31, 2**31) + "numpy.ones(2**31)"),
    (
        "The disk is full",
        "import sqlite3\ntable = sqlite3.connect('a.db')\ntable.execute('pragma max_page_count=2')\n"
        "table.execute('create table t (a)')\ntable.execute('insert into t values (zeroblob(100000))')",
    ),
    (
        "A worker process ended abruptly",
        "import os\nfrom concurrent.futures import ProcessPoolExecutor\nif __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(1) as pool:\n        pool.submit(os._exit, 1).result()",
    ),
    (
        "No more threads or processes",
        "import threading, time\nthreading.stack_size(2**29)\n"
        + LIMIT.format("AS", 2**30, 2**30)
        + "for _ in range(9):\n    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()",
    ),
]


def run_stage(folder: Path, code: str, *prefix: str) -> subprocess.CompletedProcess:
    folder.chmod(0o755)
    (folder / "stage.py").write_text(code)
    command = [*prefix, sys.executable, str(folder / "stage.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(("expected", "code"), SYSTEM_FAILURES, ids=range(len(SYSTEM_FAILURES)))
def test_real_message_of_system_failure_is_diagnosed(tmp_path, expected, code):
    done = run_stage(tmp_path, code)
    assert done.returncode and title(done.stderr, tmp_path) == expected, done.stderr[-500:]


def test_real_message_of_read_only_file_system_is_diagnosed(tmp_path):
    """The file system is mounted in a namespace that ends with the process."""
    mount = "import os\nos.mkdir('m')\nassert not os.system('mount -t tmpfs -o ro none m')\n"
    done = run_stage(tmp_path, mount + "open('m/metrics.jsonl', 'w')", "unshare", "-Urm")
    if "unshare" in done.stderr or "AssertionError" in done.stderr:
        pytest.skip("this user may not mount in a namespace")
    path = tmp_path / "stage.log"
    path.write_text(done.stderr)
    diagnosis = find_cause(read_log(path))
    assert diagnosis.signature.title == "The file system is read-only"
    assert diagnosis.explanation.cause.startswith("m/metrics.jsonl could not be written")


def test_real_message_of_stale_file_handle_is_diagnosed(tmp_path):
    done = run_stage(tmp_path, STALE)
    if "Operation not permitted" in done.stderr or "not supported" in done.stderr:
        pytest.skip("this user may not open files by their handles")
    assert title(done.stderr, tmp_path) == "Stale file handle", done.stderr[-500:]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (lambda: torch.save(torch.zeros(2**20), "/dev/full"), "The disk is full"),
        (lambda: torch.empty(2**50), "Main memory is used up"),
    ],
)
def test_real_message_of_torch_is_diagnosed(tmp_path, code, expected):
    with pytest.raises(RuntimeError) as error:
        code()
    assert title(f"RuntimeError: {error.value}", tmp_path) == expected


def diagnose(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPTS / "diagnose.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_diagnosis_of_a_rule_is_appended_to_the_log(tmp_path):
    log = tmp_path / "finetune.log"
    log.write_text(logged("cuda-out-of-memory"))
    done = diagnose(log)
    assert done.returncode == 0 and done.stdout.startswith("diagnosis: CUDA out of memory\n  cause: ")
    assert log.read_text() == logged("cuda-out-of-memory"), "by hand, the log stays as it is"
    for _ in range(2):
        done = diagnose(log, "--exit-status", 7)
        assert done.returncode == 7 and "diagnosis: CUDA out of memory" in done.stdout
    assert log.read_text() == logged("cuda-out-of-memory") + done.stdout * 2
    assert "line 9:" in done.stdout  # the error's line, not that of the earlier diagnosis


def test_input_error_is_not_diagnosed_again(tmp_path):
    log = tmp_path / "make_dataset.log"
    log.write_text("error: captions.jsonl, line 5: key 'text' is missing; a row needs id, text and images\n")
    before = log.read_text()
    assert diagnose(log).stdout == before
    done = diagnose(log, "--exit-status", 2)
    assert (done.returncode, done.stdout, log.read_text()) == (2, "", before)


def test_diverged_training_is_explained_after_its_own_sentence(tmp_path):
    sentence = str(make_divergence_error("pretrain", 3, "the loss is nan", 1e12))
    log = tmp_path / "pretrain.log"
    log.write_text(f"progress: 9 s left, 2 of 8 steps, loss 6.5\nerror: {sentence}\n")
    done = diagnose(log)
    sentence_line, cause = done.stdout.split("\n", 1)
    assert sentence_line == f"error: {sentence}" and cause.startswith("diagnosis: The loss is not a number\n")


HEALTHY = "progress: 0 s left, 8 of 8 steps, loss 2.1\nnote: 0 rows dropped\n"


def test_finished_stage_is_healthy(tmp_path):
    """The benchmark file is newer than the log, so messages in the log had no effect."""
    log, benchmark = tmp_path / "pretrain.log", tmp_path / "pretrain.benchmark.tsv"
    log.write_text(f"UserWarning: an Error in another library\n{HEALTHY}")
    benchmark.write_text("s\n1.0\n")
    done = diagnose(log)
    assert done.returncode == 0 and done.stdout.startswith("diagnosis: healthy\n")
    assert "the stage finished successfully at " in done.stdout
    os.utime(benchmark, (0, 0))  # benchmark file of an earlier run
    assert "diagnosis: not known" in diagnose(log).stdout
    log.write_text(logged("the-disk-is-full"))
    assert "diagnosis: The disk is full" in diagnose(log).stdout


def test_log_without_failure(tmp_path):
    log = tmp_path / "pretrain.log"
    for text in (HEALTHY, ""):
        log.write_text(text)
        done = diagnose(log)
        assert done.stdout.startswith("diagnosis: no failure found\n") and "run the same command again" in done.stdout
    done = diagnose(log, "--exit-status", 137)
    assert done.returncode == 137 and "diagnosis: Killed with signal 9" in done.stdout
    done = diagnose(tmp_path / "nothing.log")
    assert done.returncode == 2 and "nothing.log does not exist" in done.stderr


def test_unknown_failure_shows_the_last_lines(tmp_path):
    log = tmp_path / "pretrain.log"
    log.write_text("".join(f"line {number}\n" for number in range(50)) + "KeyError: 'lm_head.weight'\n")
    done = diagnose(log)
    assert done.returncode == 0
    assert "diagnosis: not known" in done.stdout and "    KeyError: 'lm_head.weight'\n" in done.stdout
    assert "line 49" in done.stdout and "line 40" not in done.stdout
    assert "docs/troubleshooting.md" in done.stdout


def test_diagnosis_needs_only_packages_of_every_environment():
    """Diagnoses run in the environment of the failed rule."""
    environments = [path.read_text(encoding="utf-8") for path in (PROJECT / "envs").glob("*.yaml")]
    assert environments and all("pyyaml==" in text for text in environments)
    own = {path.stem for path in SCRIPTS.iterdir()}
    for module in find_modules(SCRIPTS / "diagnose.py"):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", module.read_text(encoding="utf-8"), re.MULTILINE)
        assert not set(imported) - sys.stdlib_module_names - own - {"yaml"}, module


KERNEL_LOG = """\
6,1380,61234567,-;Call Trace:
 SUBSYSTEM=memory
4,1381,62000000,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python,pid=13266,uid=1000
3,1382,62000100,-;Out of memory: Killed process 13266 (python) total-vm:98304000kB, anon-rss:62914560kB, \
file-rss:2048kB, shmem-rss:1048576kB, UID:1000 pgtables:129000kB oom_score_adj:0
3,1383,63000000,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:9830400kB, anon-rss:8388608kB, \
file-rss:0kB, shmem-rss:0kB, UID:0
"""


def test_kernel_records_give_process_time_and_memory():
    full, limited = parse_kernel_log(KERNEL_LOG, booted=1000.0)
    assert (full.pid, full.name, full.memory_bytes, full.by_limit) == (13266, "python", 61 * GIB, False)
    assert full.time == pytest.approx(1062.0001)
    assert (limited.pid, limited.memory_bytes, limited.by_limit) == (77, 8 * GIB, True)


def test_kernel_log_of_this_machine():
    kills = read_kernel_kills()
    assert kills is None or all(kill.pid > 0 for kill in kills)
    assert read_kernel_kills(Path("/nowhere")) is None


def test_kill_is_explained_with_held_and_total_memory():
    full = OomKill(13266, "python", 61 * GIB, by_limit=False, time=62.0)
    limited = OomKill(77, "python", 8 * GIB, by_limit=True, time=63.0)
    no_limit = CgroupLimits(None, None, None)
    cause = describe_kill([full], no_limit, 64 * GIB).cause
    assert "machine's memory was full" in cause
    assert "process 13266 (python), which held 61.0 GiB; this machine has 64.0 GiB" in cause
    cause = describe_kill([limited], CgroupLimits(8 * GIB, None, 1), 64 * GIB).cause
    assert "job's memory limit was reached" in cause and "may use 8.0 GiB" in cause
    cause = describe_kill(None, CgroupLimits(8 * GIB, None, 2), 64 * GIB).cause
    assert "memory limit of 8.0 GiB was reached; it has ended 2 process(es)" in cause


def test_kill_is_shown_with_last_memory_reading(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    rows = "attempt,time,seconds,phase,job_gib,host_gib\n1,2026-03-02T10:16:20,38.0,loading,61.2,63.1\n1,2026-03"
    (tmp_path / "checkpoints/memory.csv").write_text(rows)
    log = PROJECT / "tests/fixtures/logs/killed-with-signal-9.log"
    (tmp_path / "finetune.log").write_text(log.read_text(encoding="utf-8"))
    cause = find_cause(read_log(tmp_path / "finetune.log")).explanation.cause
    assert "(phase loading) the job held 61.2 GiB and the whole machine 63.1 GiB" in cause


def test_kill_without_records_is_not_attributed_to_memory():
    for kills, reason in ((None, "may not be read"), ([], "holds no record")):
        explanation = describe_kill(kills, CgroupLimits(None, None, None), 64 * GIB)
        assert reason in explanation.cause and "was full" not in explanation.cause
        assert "dmesg" in explanation.remedy
