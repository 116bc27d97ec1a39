"""Findings of the doctor for fake probes (GPUs, drivers, limits), and its probes on this machine."""

import json
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from huggingface_hub import snapshot_download

from dj2mgm.health import doctor_checks
from dj2mgm.health.doctor_checks import build_environment_variables, write_environment
from dj2mgm.health.probes import (
    CudaProbe,
    DriverProbe,
    Gpu,
    GpuProcess,
    HostProbe,
    ProbeOutput,
    Toolkit,
    TorchProbe,
    describe_process,
    end_orphans,
    find_toolkit,
    probe_cuda,
    probe_driver,
    probe_host,
)
from dj2mgm.model_files.model_folders import find_model, is_folder_path
from dj2mgm.monitoring.memory_files import CgroupLimits
from dj2mgm.torch_environment import locate_extensions
from forked_python import forked_python
from paths import PROJECT

GIB = 2**30
CARD = Gpu(0, "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB)
DRIVER = DriverProbe(1, version="550.54.15", cuda="12.4", gpus=(CARD,))
NO_GPU = DriverProbe(0, error="NVML Shared Library Not Found")
TORCH = TorchProbe("2.6.0+cu124", "12.4", 1, True, True, None, "2.21.5", None, "2.8.3", None)
CPU_TORCH = TorchProbe("2.13.0+cpu", None, 0, False, False, None, None, None, None, "No module named 'flash_attn'")
CUDA = CudaProbe(None, Toolkit("/usr/local/cuda", "12.4"), ())
OLD = Toolkit("/usr", "11.5")
HOST = HostProbe(
    memory=64 * GIB,
    available=60 * GIB,
    swap=64 * GIB,
    cores=16,
    cgroup=CgroupLimits(None, None, None),
    shared=32 * GIB,
    disk=500 * GIB,
    open_files=65536,
    processes=None,
    address_space=None,
    loopback_error=None,
)
RANK = GpuProcess(0, 4711, 5 * GIB, "python -u workflow_scripts/finetune.py", mine=True, orphan=True)


def make_output(probe: TorchProbe) -> ProbeOutput:
    return ProbeOutput(asdict(probe), "")


BROKEN = ProbeOutput(None, "ImportError: libcudart.so.12: cannot open shared object file\nexit status 1")
BUILD = (PROJECT / "tests/fixtures/logs/cpu_adam-could-not-be-built.log").read_text(encoding="utf-8")

# name: (finding, status, text in the reason and the remedy)
FINDINGS = {
    "driver": (doctor_checks.check_driver(DRIVER), "pass", "550.54.15, for CUDA up to 12.4: NVIDIA GeForce RTX 4090"),
    "no card": (doctor_checks.check_driver(NO_GPU), "skip", "everything runs on the CPU"),
    "card without driver": (
        doctor_checks.check_driver(DriverProbe(1, error="Driver/library version mismatch")),
        "fail",
        "Driver/library version mismatch → reboot",
    ),
    "torch": (doctor_checks.check_torch(make_output(TORCH), DRIVER), "pass", "built with CUDA 12.4, sees 1 GPU"),
    "torch on a CPU": (doctor_checks.check_torch(make_output(CPU_TORCH), NO_GPU), "pass", "on the CPU"),
    "torch that does not load": (doctor_checks.check_torch(BROKEN, DRIVER), "fail", "libcudart.so.12"),
    "CPU torch with a GPU": (doctor_checks.check_torch(make_output(CPU_TORCH), DRIVER), "fail", "is a CPU build"),
    "torch for a newer driver": (
        doctor_checks.check_torch(make_output(replace(TORCH, cuda="13.0")), DRIVER),
        "fail",
        "needs a driver for CUDA 13.0; 550.54.15 supports 12.4",
    ),
    "torch that sees no GPU": (
        doctor_checks.check_torch(make_output(replace(TORCH, gpus=0)), DRIVER),
        "fail",
        "CUDA_VISIBLE_DEVICES",
    ),
    "toolkit": (
        doctor_checks.check_toolkit(CUDA, TORCH, DRIVER),
        "pass",
        "nvcc 12.4 in /usr/local/cuda, the same version as torch's",
    ),
    "toolkit of another minor version": (
        doctor_checks.check_toolkit(CudaProbe(None, Toolkit("/usr/local/cuda", "12.1"), ()), TORCH, DRIVER),
        "pass",
        "compatible with torch's 12.4",
    ),
    "toolkit 11.5 against torch 12.4": (
        doctor_checks.check_toolkit(CudaProbe(None, OLD, ()), TORCH, DRIVER),
        "fail",
        "nvcc 11.5 in /usr does not match torch's CUDA 12.4; DeepSpeed refuses to compile → install the CUDA 12.4",
    ),
    "toolkit 11.5 first, 12.4 elsewhere": (
        doctor_checks.check_toolkit(CudaProbe(None, OLD, (CUDA.used,)), TORCH, DRIVER),
        "fail",
        "→ python workflow_scripts/doctor.py --fix && source results/doctor/environment.sh",
    ),
    "no toolkit": (doctor_checks.check_toolkit(CudaProbe(None, None, ()), TORCH, DRIVER), "fail", "nvcc is missing"),
    "CUDA_HOME without nvcc": (
        doctor_checks.check_toolkit(CudaProbe("/opt/gone", None, ()), TORCH, DRIVER),
        "fail",
        "CUDA_HOME=/opt/gone has no nvcc",
    ),
    "toolkit without a GPU": (doctor_checks.check_toolkit(CudaProbe(None, OLD, ()), CPU_TORCH, NO_GPU), "skip", ""),
    "cuBLAS": (doctor_checks.check_matmul(TORCH), "pass", "matrix products"),
    "cuBLAS that fails": (
        doctor_checks.check_matmul(replace(TORCH, matmul_error="RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED")),
        "fail",
        "CUBLAS_STATUS_EXECUTION_FAILED → unset LD_LIBRARY_PATH",
    ),
    "cuBLAS without a GPU": (doctor_checks.check_matmul(CPU_TORCH), "skip", ""),
    "bf16": (doctor_checks.check_bf16(TORCH), "pass", ""),
    "no bf16": (doctor_checks.check_bf16(replace(TORCH, bf16=False)), "warn", "precision: fp32"),
    "FP8": (doctor_checks.check_fp8(TORCH, {"finetune"}), "pass", ""),
    "no FP8": (
        doctor_checks.check_fp8(replace(TORCH, fp8=False), {"pretrain", "finetune"}),
        "fail",
        "set finetune.precision and pretrain.precision: bf16",
    ),
    "FP8 that no stage needs": (doctor_checks.check_fp8(CPU_TORCH, ()), "skip", ""),
    "NCCL": (doctor_checks.check_nccl(TORCH), "pass", "2.21.5"),
    "NCCL that fails": (
        doctor_checks.check_nccl(replace(TORCH, nccl_error="DistBackendError: unhandled system error")),
        "fail",
        "unhandled system error → NCCL_DEBUG=INFO",
    ),
    "flash-attn": (doctor_checks.check_flash_attention(TORCH), "pass", "2.8.3"),
    "no flash-attn": (
        doctor_checks.check_flash_attention(replace(TORCH, flash_attention=None, flash_attention_error="No module")),
        "warn",
        "training works without it (No module) → bash envs/train.post-deploy.sh",
    ),
    "no locks": (doctor_checks.check_locks([]), "pass", ""),
    "a stale lock": (
        doctor_checks.check_locks([Path("/home/kim/.cache/torch_extensions/py311_cu124/cpu_adam/lock")]),
        "warn",
        "cpu_adam/lock → python workflow_scripts/compile_extensions.py",
    ),
    "CPUAdam": (doctor_checks.check_extension(ProbeOutput({"seconds": 2.4}, "")), "pass", "loads in 2.4 s"),
    "CPUAdam at first": (
        doctor_checks.check_extension(ProbeOutput({"seconds": 116.2}, "")),
        "pass",
        "compiled in 116 s (once)",
    ),
    "CPUAdam that does not compile": (
        doctor_checks.check_extension(ProbeOutput(None, BUILD)),
        "warn",
        "cannot find -lcurand",
    ),
    "CPUAdam that fails otherwise": (
        doctor_checks.check_extension(ProbeOutput(None, "Traceback\nValueError: strange")),
        "warn",
        "ValueError: strange → python workflow_scripts/compile_extensions.py",
    ),
    "CPUAdam behind a lock": (doctor_checks.check_extension(None), "skip", "because of the build locks"),
    "no process on the GPU": (doctor_checks.check_gpu_processes(DRIVER), "pass", ""),
    "a stray on the GPU": (
        doctor_checks.check_gpu_processes(replace(DRIVER, processes=(RANK,))),
        "warn",
        "GPU 0: 4711 (python -u workflow_scripts/finetune.py, orphaned) holds 5.0 GiB → python",
    ),
    "memory": (doctor_checks.check_memory(HOST), "pass", "60.0 GiB of 64.0 GiB"),
    "no memory": (doctor_checks.check_memory(replace(HOST, available=GIB)), "fail", "embedded default"),
    "no limits": (doctor_checks.check_cgroup(HOST), "pass", "no limits"),
    "limits": (
        doctor_checks.check_cgroup(replace(HOST, cgroup=CgroupLimits(16 * GIB, 4.0, 0))),
        "pass",
        "memory is limited to 16.0 GiB of 64.0 GiB; processor time is limited to 4 of 16 cores",
    ),
    "a limit that has struck": (
        doctor_checks.check_cgroup(replace(HOST, cgroup=CgroupLimits(16 * GIB, None, 2))),
        "warn",
        "2 process(es) were killed here",
    ),
    "a narrow limit": (
        doctor_checks.check_cgroup(replace(HOST, cgroup=CgroupLimits(GIB, None, 0))),
        "fail",
        "limited to 1.0 GiB",
    ),
    "/dev/shm": (doctor_checks.check_shared_memory(HOST, 4), "pass", "32.0 GiB"),
    "small /dev/shm": (
        doctor_checks.check_shared_memory(replace(HOST, shared=64 * 2**20), 4),
        "fail",
        "has 64 MiB free; 4 loader_workers",
    ),
    "small /dev/shm, not used": (
        doctor_checks.check_shared_memory(replace(HOST, shared=None), 0),
        "warn",
        "",
    ),
    "disk": (doctor_checks.check_disk(HOST), "pass", "500.0 GiB"),
    "no disk": (doctor_checks.check_disk(replace(HOST, disk=GIB)), "fail", "→ du -sh"),
    "ulimits": (doctor_checks.check_ulimits(HOST), "pass", "65536 open files"),
    "few open files": (doctor_checks.check_ulimits(replace(HOST, open_files=256)), "fail", "→ ulimit -n 1024"),
    "few processes": (doctor_checks.check_ulimits(replace(HOST, processes=100)), "warn", "→ ulimit -u"),
    "narrow address space": (
        doctor_checks.check_ulimits(replace(HOST, address_space=8 * GIB)),
        "fail",
        "→ ulimit -v unlimited",
    ),
    "loopback": (doctor_checks.check_loopback(HOST), "pass", "127.0.0.1"),
    "no loopback": (
        doctor_checks.check_loopback(replace(HOST, loopback_error="[Errno 101] Network is unreachable")),
        "fail",
        "[Errno 101] Network is unreachable; training stages need one, also on one GPU or CPU → sudo ip link",
    ),
}


@pytest.mark.parametrize("case", FINDINGS)
def test_findings_of_fake_probes(case):
    finding, status, words = FINDINGS[case]
    assert finding.status == status
    assert words in f"{finding.reason} → {finding.remedy}"
    assert bool(finding.remedy) == (status in ("warn", "fail")), "only warnings and failures have a remedy"


def test_every_check_has_a_passing_and_a_failing_case():
    checks = {name for name in vars(doctor_checks) if name.startswith("check_")} - {"check_models"}
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(source.count(f"checks.{name}(") >= 2 for name in checks)
    shown: dict[str, set[str]] = {}
    for finding, status, _ in FINDINGS.values():
        shown.setdefault(finding.name, set()).add(status)
    assert len(shown) == len(checks)
    assert all("pass" in statuses and statuses & {"warn", "fail"} for statuses in shown.values())


def test_own_configuration_passes_and_wrong_key_fails(monkeypatch):
    monkeypatch.chdir(PROJECT)
    runs, finding = doctor_checks.read_runs({})
    assert finding.status == "pass" and "baseline" in finding.reason
    runs, finding = doctor_checks.read_runs({"modle": "tiny"})
    assert runs is None and finding.status == "fail" and "did you mean 'model'?" in finding.reason


@pytest.mark.parametrize(
    ("model", "foundation", "reason"),
    [("tiny", "shipped", "its parts come with the workflow"), ("tiny-smolvlm", "train", "the workflow trains it")],
)
def test_finding_of_a_tiny_model_names_its_origin(monkeypatch, model, foundation, reason):
    monkeypatch.chdir(PROJECT)
    runs, _ = doctor_checks.read_runs({"model": model, "foundation": foundation})
    [finding] = doctor_checks.check_models(runs)
    assert (finding.status, finding.reason) == ("skip", reason)


@pytest.mark.parametrize(
    ("model", "folder"),
    [("mgm-2b", "model_zoo/gemma-2b-it"), ("internvl3.5-1b", "OpenGVLab/InternVL3_5-1B-HF")],
)
def test_missing_model_fails_with_a_remedy(monkeypatch, model, folder):
    monkeypatch.chdir(PROJECT)
    runs, _ = doctor_checks.read_runs({"model": model})
    [finding] = doctor_checks.check_models(runs)
    assert (
        finding.status == "fail"
        and folder in finding.reason
        and f"snakemake fetch --config model={model}" in finding.remedy
    )


COMMIT = "0" * 40  # id of a repository on the hub


def test_hub_id_is_distinguished_from_folder():
    assert not is_folder_path("google/gemma-2b") and not is_folder_path("gpt2")
    assert all(map(is_folder_path, ("/models/gemma", "model_zoo/gemma-2b-it", "results/foundation/x/clip")))


def test_hub_id_resolves_to_folder_in_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--Qwen--Qwen3-VL-2B-Instruct/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(COMMIT)
    downloaded = snapshot_download("Qwen/Qwen3-VL-2B-Instruct", cache_dir=tmp_path, local_files_only=True)
    assert find_model("Qwen/Qwen3-VL-2B-Instruct") == str(snapshot) == downloaded
    assert find_model("Qwen/another") == "Qwen/another"
    assert find_model("model_zoo/qwen") == "model_zoo/qwen"


# the environment file


def test_environment_points_to_matching_toolkit():
    values = build_environment_variables(CudaProbe("/usr", OLD, (CUDA.used,)), "12.4")
    assert values == {
        "CUDA_HOME": "/usr/local/cuda",
        "DS_BUILD_OPS": "0",
        "DS_SKIP_CUDA_CHECK": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def test_cuda_check_is_skipped_only_for_compatible_versions():
    assert (
        build_environment_variables(CudaProbe(None, Toolkit("/opt/cuda", "12.9"), ()), "12.4")["DS_SKIP_CUDA_CHECK"]
        == "1"
    )
    only_old = build_environment_variables(CudaProbe(None, OLD, ()), "12.4")
    assert only_old["DS_SKIP_CUDA_CHECK"] == "0" and "CUDA_HOME" not in only_old
    assert "CUDA_HOME" not in build_environment_variables(CUDA, None)


def test_shell_reads_environment_file(tmp_path):
    path = tmp_path / "with space" / "environment.sh"
    write_environment({"CUDA_HOME": "/opt/cuda 12", "DS_BUILD_OPS": "0"}, path)
    command = ["bash", "-c", 'source "$0" && printenv CUDA_HOME DS_BUILD_OPS', str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "/opt/cuda 12\n0\n"


# real orphaned processes of this user


@pytest.fixture
def orphan():
    """Start a process with a parent that has ended."""
    start = "nohup sleep 60 > /dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["bash", "-c", start], capture_output=True, text=True, check=True).stdout)
    yield pid
    if psutil.pid_exists(pid):
        psutil.Process(pid).kill()


def test_only_orphans_are_ended(orphan):
    deadline = time.monotonic() + 5
    while (process := describe_process(0, orphan, None)).command != "sleep 60" and time.monotonic() < deadline:
        time.sleep(0.05)
    if not process.orphan:
        pytest.skip("orphans are adopted by another process here")
    assert process.mine and process.command == "sleep 60"
    with subprocess.Popen(["sleep", "60"]) as child:
        cared_for = describe_process(0, child.pid, None)
        assert cared_for.mine and not cared_for.orphan
        assert end_orphans((process, cared_for)) == [orphan]
        child.kill()
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE


def test_foreign_and_invisible_processes_are_never_ended(orphan):
    foreign = GpuProcess(0, orphan, GIB, "python", mine=False, orphan=True)
    adopted = GpuProcess(0, orphan, GIB, "python", mine=True, orphan=False)
    assert end_orphans((foreign, adopted)) == []
    assert psutil.Process(orphan).is_running()
    process = describe_process(0, 2**22 + 1, GIB)  # above the largest process id
    assert (process.command, process.mine) == ("", False)


# the probes on this machine


def test_probes_of_this_machine_answer():
    driver, cuda, host = probe_driver(), probe_cuda(), probe_host(Path("results/not/there"))
    assert driver.gpus or driver.error
    assert cuda.used is None or find_toolkit(cuda.used.home) == cuda.used
    assert host.memory >= host.available > 0 and host.disk > 0 and host.cores > 0


def doctor(*arguments: str) -> subprocess.CompletedProcess:
    command = [forked_python(), "workflow_scripts/doctor.py", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)


def test_doctor_prints_json_and_exits_with_1_on_failure(tmp_path, monkeypatch):
    """A stale lock keeps the doctor from compiling DeepSpeed's optimizer, which takes minutes."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = locate_extensions() / "cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    done = doctor("--json", "--config", '{"modle": "tiny"}')
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1 and findings["configuration"]["status"] == "fail"
    assert findings["torch"]["status"] == "pass"
    assert "checking PyTorch and its kernels" in done.stderr, "a person sees what takes long"
    assert findings["build locks"]["status"] == "warn" and findings["DeepSpeed CPUAdam"]["status"] == "skip"
    assert all(set(finding) == {"name", "status", "reason", "remedy"} for finding in findings.values())
