"""Findings of the doctor for fake probes (GPUs, drivers, limits), and its probes on this machine."""

import json
import re
import shutil
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from huggingface_hub import snapshot_download

from dj2mgm.health import gpu_checks, host_checks, project_checks
from dj2mgm.health.cuda_probe import CudaProbe, Toolkit, find_toolkit, probe_cuda
from dj2mgm.health.driver_probe import (
    DriverProbe,
    Gpu,
    GpuProcess,
    describe_process,
    end_orphans,
    probe_driver,
)
from dj2mgm.health.environment_file import build_environment_variables, write_environment
from dj2mgm.health.host_probe import HostProbe, probe_host
from dj2mgm.health.probe_process import ProbeOutput
from dj2mgm.health.torch_probe import TorchProbe
from dj2mgm.model_files.model_folders import find_model, is_folder_path
from dj2mgm.monitoring.cgroups import CgroupLimits
from dj2mgm.planning.prediction import Machine
from dj2mgm.settings.dataset_files import Split
from dj2mgm.settings.deepspeed_files import read_deepspeed
from dj2mgm.storage.files import read_json, write_yaml
from forked_python import forked_python
from paths import PROJECT
from tiny_models import mgm_config

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
    "driver": (gpu_checks.check_driver(DRIVER), "pass", "550.54.15, for CUDA up to 12.4: NVIDIA GeForce RTX 4090"),
    "no card": (gpu_checks.check_driver(NO_GPU), "skip", "everything runs on the CPU"),
    "card without driver": (
        gpu_checks.check_driver(DriverProbe(1, error="Driver/library version mismatch")),
        "fail",
        "Driver/library version mismatch → reboot",
    ),
    "torch": (gpu_checks.check_torch(make_output(TORCH), DRIVER), "pass", "built with CUDA 12.4, sees 1 GPU"),
    "torch on a CPU": (gpu_checks.check_torch(make_output(CPU_TORCH), NO_GPU), "pass", "on the CPU"),
    "torch that does not load": (gpu_checks.check_torch(BROKEN, DRIVER), "fail", "libcudart.so.12"),
    "CPU torch with a GPU": (gpu_checks.check_torch(make_output(CPU_TORCH), DRIVER), "fail", "is a CPU build"),
    "torch for a newer driver": (
        gpu_checks.check_torch(make_output(replace(TORCH, cuda="13.0")), DRIVER),
        "fail",
        "needs a driver for CUDA 13.0; 550.54.15 supports 12.4",
    ),
    "torch that sees no GPU": (
        gpu_checks.check_torch(make_output(replace(TORCH, gpus=0)), DRIVER),
        "fail",
        "CUDA_VISIBLE_DEVICES",
    ),
    "toolkit": (
        gpu_checks.check_toolkit(CUDA, TORCH, DRIVER),
        "pass",
        "nvcc 12.4 in /usr/local/cuda, the same version as torch's",
    ),
    "toolkit of another minor version": (
        gpu_checks.check_toolkit(CudaProbe(None, Toolkit("/usr/local/cuda", "12.1"), ()), TORCH, DRIVER),
        "pass",
        "compatible with torch's 12.4",
    ),
    "toolkit 11.5 against torch 12.4": (
        gpu_checks.check_toolkit(CudaProbe(None, OLD, ()), TORCH, DRIVER),
        "fail",
        "nvcc 11.5 in /usr does not match torch's CUDA 12.4; DeepSpeed refuses to compile → install the CUDA 12.4",
    ),
    "toolkit 11.5 first, 12.4 elsewhere": (
        gpu_checks.check_toolkit(CudaProbe(None, OLD, (CUDA.used,)), TORCH, DRIVER),
        "fail",
        "→ python workflow_scripts/doctor.py --fix && source results/doctor/environment.sh",
    ),
    "no toolkit": (gpu_checks.check_toolkit(CudaProbe(None, None, ()), TORCH, DRIVER), "fail", "nvcc is missing"),
    "CUDA_HOME without nvcc": (
        gpu_checks.check_toolkit(CudaProbe("/opt/gone", None, ()), TORCH, DRIVER),
        "fail",
        "CUDA_HOME=/opt/gone has no nvcc",
    ),
    "toolkit without a GPU": (gpu_checks.check_toolkit(CudaProbe(None, OLD, ()), CPU_TORCH, NO_GPU), "skip", ""),
    "cuBLAS": (gpu_checks.check_matmul(TORCH), "pass", "matrix products"),
    "cuBLAS that fails": (
        gpu_checks.check_matmul(replace(TORCH, matmul_error="RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED")),
        "fail",
        "CUBLAS_STATUS_EXECUTION_FAILED → unset LD_LIBRARY_PATH",
    ),
    "cuBLAS without a GPU": (gpu_checks.check_matmul(CPU_TORCH), "skip", ""),
    "bf16": (gpu_checks.check_bf16(TORCH), "pass", ""),
    "no bf16": (gpu_checks.check_bf16(replace(TORCH, bf16=False)), "warn", "precision: fp32"),
    "FP8": (gpu_checks.check_fp8(TORCH, {"finetune"}), "pass", ""),
    "no FP8": (
        gpu_checks.check_fp8(replace(TORCH, fp8=False), {"pretrain", "finetune"}),
        "fail",
        "set finetune.precision and pretrain.precision: bf16",
    ),
    "FP8 that no stage needs": (gpu_checks.check_fp8(CPU_TORCH, ()), "skip", ""),
    "NCCL": (gpu_checks.check_nccl(TORCH), "pass", "2.21.5"),
    "NCCL that fails": (
        gpu_checks.check_nccl(replace(TORCH, nccl_error="DistBackendError: unhandled system error")),
        "fail",
        "unhandled system error → NCCL_DEBUG=INFO",
    ),
    "flash-attn": (gpu_checks.check_flash_attention(TORCH), "pass", "2.8.3"),
    "no flash-attn": (
        gpu_checks.check_flash_attention(replace(TORCH, flash_attention=None, flash_attention_error="No module")),
        "warn",
        "training works without it (No module) → bash envs/train.post-deploy.sh",
    ),
    "no locks": (gpu_checks.check_locks([]), "pass", ""),
    "a stale lock": (
        gpu_checks.check_locks([Path("/home/kim/.cache/torch_extensions/py311_cu124/cpu_adam/lock")]),
        "warn",
        "cpu_adam/lock → python workflow_scripts/compile_extensions.py",
    ),
    "CPUAdam": (gpu_checks.check_extension(ProbeOutput({"seconds": 2.4}, "")), "pass", "loads in 2.4 s"),
    "CPUAdam that does not compile": (
        gpu_checks.check_extension(ProbeOutput(None, BUILD)),
        "warn",
        "cannot find -lcurand",
    ),
    "CPUAdam that fails otherwise": (
        gpu_checks.check_extension(ProbeOutput(None, "Traceback\nValueError: strange")),
        "warn",
        "ValueError: strange → python workflow_scripts/compile_extensions.py",
    ),
    "CPUAdam behind a lock": (gpu_checks.check_extension(None), "skip", "because of the build locks"),
    "no process on the GPU": (gpu_checks.check_gpu_processes(DRIVER), "pass", ""),
    "a stray on the GPU": (
        gpu_checks.check_gpu_processes(replace(DRIVER, processes=(RANK,))),
        "warn",
        "GPU 0: 4711 (python -u workflow_scripts/finetune.py, orphaned) holds 5.0 GiB → python",
    ),
    "memory": (host_checks.check_memory(HOST, True), "pass", "60.0 GiB of 64.0 GiB"),
    "little memory": (host_checks.check_memory(replace(HOST, available=6 * GIB), True), "warn", "LoRA"),
    "little memory without a GPU": (host_checks.check_memory(replace(HOST, available=6 * GIB), False), "pass", ""),
    "no memory": (host_checks.check_memory(replace(HOST, available=GIB), False), "fail", "embedded default"),
    "swap": (host_checks.check_swap(HOST, True), "pass", "64.0 GiB in addition to 64.0 GiB"),
    "no swap": (
        host_checks.check_swap(replace(HOST, swap=0), True),
        "warn",
        "needs 67.0 GiB, and the kernel would kill it → sudo fallocate",
    ),
    "no swap without a GPU": (host_checks.check_swap(replace(HOST, swap=0), False), "pass", ""),
    "no limits": (host_checks.check_cgroup(HOST), "pass", "no limits"),
    "limits": (
        host_checks.check_cgroup(replace(HOST, cgroup=CgroupLimits(16 * GIB, 4.0, 0))),
        "pass",
        "memory is limited to 16.0 GiB of 64.0 GiB; processor time is limited to 4 of 16 cores",
    ),
    "a limit that has struck": (
        host_checks.check_cgroup(replace(HOST, cgroup=CgroupLimits(16 * GIB, None, 2))),
        "warn",
        "2 process(es) were killed here",
    ),
    "a narrow limit": (
        host_checks.check_cgroup(replace(HOST, cgroup=CgroupLimits(GIB, None, 0))),
        "fail",
        "limited to 1.0 GiB",
    ),
    "/dev/shm": (host_checks.check_shared_memory(HOST, 4), "pass", "32.0 GiB"),
    "small /dev/shm": (
        host_checks.check_shared_memory(replace(HOST, shared=64 * 2**20), 4),
        "fail",
        "has 64 MiB free; 4 loader_workers",
    ),
    "small /dev/shm that no stage uses": (host_checks.check_shared_memory(replace(HOST, shared=None), 0), "warn", ""),
    "disk": (host_checks.check_disk(HOST, 12 * GIB), "pass", "500.0 GiB"),
    "little disk": (
        host_checks.check_disk(replace(HOST, disk=11 * GIB), 12 * GIB),
        "warn",
        "one experiment needs 12.0 GiB and the data",
    ),
    "disk for an unknown model": (host_checks.check_disk(replace(HOST, disk=20 * GIB), None), "pass", "20.0 GiB"),
    "no disk": (host_checks.check_disk(replace(HOST, disk=GIB), GIB), "fail", "→ du -sh"),
    "ulimits": (host_checks.check_ulimits(HOST), "pass", "65536 open files"),
    "few open files": (host_checks.check_ulimits(replace(HOST, open_files=256)), "fail", "→ ulimit -n 1024"),
    "few processes": (host_checks.check_ulimits(replace(HOST, processes=100)), "warn", "→ ulimit -u"),
    "narrow address space": (
        host_checks.check_ulimits(replace(HOST, address_space=8 * GIB)),
        "fail",
        "→ ulimit -v unlimited",
    ),
    "loopback": (host_checks.check_loopback(HOST), "pass", "127.0.0.1"),
    "no loopback": (
        host_checks.check_loopback(replace(HOST, loopback_error="[Errno 101] Network is unreachable")),
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
    checks = {name for module in (gpu_checks, host_checks) for name in vars(module) if name.startswith("check_")}
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(source.count(f"checks.{name}(") >= 2 for name in checks)
    shown: dict[str, set[str]] = {}
    for finding, status, _ in FINDINGS.values():
        shown.setdefault(finding.name, set()).add(status)
    assert len(shown) == len(checks)
    assert all("pass" in statuses and statuses & {"warn", "fail"} for statuses in shown.values())


# datasets in real files


@pytest.fixture
def photos(tmp_path) -> dict[str, Split]:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").write_bytes(b"x")
    row = {"id": "1", "text": "<__dj__image>\na boat <|__dj__eoc|>", "images": ["images/1.jpg"]}
    (tmp_path / "captions.jsonl").write_text(json.dumps(row) + "\n")
    return {"pretrain": Split(file=str(tmp_path / "captions.jsonl"), images=str(tmp_path))}


def test_dataset_with_all_images_passes(photos):
    finding = project_checks.check_dataset("dataset photos", photos)
    assert (finding.status, finding.reason) == ("pass", "1 image in pretrain; all exist")


def test_missing_image_fails_if_no_stage_drops_it(photos, tmp_path):
    (tmp_path / "images/1.jpg").unlink()
    finding = project_checks.check_dataset("dataset photos", photos)
    assert finding.status == "warn" and str(tmp_path / "images/1.jpg") in finding.reason
    evaluation = {"id": "e", "image": "../outside.jpg", "captions": ["a boat"]}
    (tmp_path / "evaluation.jsonl").write_text(json.dumps(evaluation) + "\n")
    both = photos | {"evaluation": Split(file=str(tmp_path / "evaluation.jsonl"), images=str(tmp_path))}
    finding = project_checks.check_dataset("dataset photos", both)
    assert finding.status == "fail" and "../outside.jpg leaves the image folder" in finding.reason


def test_unreadable_dataset_fails_with_file_and_line(photos):
    Path(photos["pretrain"].file).write_text('{"id": "1"}\n')
    finding = project_checks.check_dataset("dataset photos", photos)
    assert finding.status == "fail" and "captions.jsonl, line 1: key 'text' is missing" in finding.reason


def test_own_configuration_passes_and_wrong_key_fails(monkeypatch):
    monkeypatch.chdir(PROJECT)
    runs, finding = project_checks.read_runs({})
    assert finding.status == "pass" and "baseline" in finding.reason
    assert [finding.status for finding in project_checks.check_data(runs)] == ["skip"]
    runs, finding = project_checks.read_runs({"modle": "tiny"})
    assert runs is None and finding.status == "fail" and "did you mean 'model'?" in finding.reason


@pytest.mark.parametrize("model", ["tiny", "tiny-smolvlm"])
@pytest.mark.parametrize(
    ("foundation", "reason"), [("shipped", "its parts come with the workflow"), ("train", "the workflow trains it")]
)
def test_finding_of_a_tiny_model_names_its_origin(monkeypatch, model, foundation, reason):
    monkeypatch.chdir(PROJECT)
    runs, _ = project_checks.read_runs({"model": model, "foundation": foundation})
    [finding] = project_checks.check_models(runs)
    assert (finding.status, finding.reason) == ("skip", reason)


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("mgm-2b", "model_zoo/gemma-2b-it"),
        ("mgm-2b-released", "model_zoo/mgm-2b"),
        ("internvl3.5-1b", "OpenGVLab/InternVL3_5-1B-HF"),
    ],
)
def test_missing_model_fails_with_a_remedy(monkeypatch, model, folder):
    monkeypatch.chdir(PROJECT)
    runs, _ = project_checks.read_runs({"model": model})
    [finding] = project_checks.check_models(runs)
    assert (
        finding.status == "fail"
        and folder in finding.reason
        and f"snakemake fetch --config model={model}" in finding.remedy
    )


COMMIT = "0" * 40  # id of a repository on the hub


@pytest.mark.parametrize(
    ("part", "local"),
    [
        ("google/gemma-2b", False),
        ("gpt2", False),
        ("/models/gemma", True),
        ("model_zoo/gemma-2b-it", True),
        ("results/foundation/x/clip", True),
    ],
)
def test_hub_id_is_distinguished_from_folder(part, local):
    assert is_folder_path(part) == local


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


# memory plans for fictional machines


@pytest.fixture
def mgm_2b(monkeypatch):
    monkeypatch.chdir(PROJECT)
    runs, _ = project_checks.read_runs({"model": "mgm-2b"})
    return runs.first_seed("baseline")


@pytest.mark.parametrize(
    ("machine", "status", "reason"),
    [
        (Machine(1, 140.0, 128.0), "pass", r"^\d+\.\d GiB of the GPU and \d+\.\d GiB of main memory by lora"),
        (
            Machine(1, 4.0, 62.6),
            "fail",
            r"no training plan fits this machine. .* \d+\.\d GiB of the GPU's memory instead of 4.0",
        ),
        pytest.param(
            Machine(1, 23.63, 2.0),
            "fail",
            r"no training plan fits this machine. .* \d+\.\d GiB of the host's memory instead of 2.0",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["room", "small card", "small host"],
)
def test_plan_of_mgm_2b_on_three_machines(mgm_2b, machine, status, reason):
    finding = project_checks.check_plan(mgm_2b, "finetune", machine)
    assert finding.status == status and re.search(reason, finding.reason)
    assert (finding.status == "pass") == (not finding.remedy)


def test_lora_needs_the_disk_of_lora(mgm_2b):
    lora, full = (
        project_checks.read_runs({"model": "mgm-2b"} | further)[0] for further in ({}, {"finetune": {"lora": None}})
    )
    needed = [project_checks.predict_needed_disk(runs) / GIB for runs in (lora, full)]
    assert needed[0] < 30 < 64 < needed[1]
    assert not project_checks.trains_fully(lora) and project_checks.trains_fully(full)


def test_untrained_model_has_no_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROJECT / "config", "config")
    runs, _ = project_checks.read_runs({})
    finding = project_checks.check_plan(runs.first_seed("baseline"), "pretrain", Machine(1, 23.63, 62.6))
    assert finding.status == "skip" and "`snakemake plan` or the first training makes it" in finding.reason


@pytest.fixture
def tiny_runs(monkeypatch, tmp_path):
    """Read the project's configuration with a tiny model, whose plan takes a tenth of the time."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROJECT / "config", "config")
    mgm_config().save_pretrained("mgm")
    keys = {"assembled": "mgm", "clip": "clip", "pretrain_template": "plain", "template": "gemma"}
    write_yaml(Path("config/models/tiny_mgm.yaml"), keys)
    return project_checks.read_runs({"model": "tiny_mgm"})[0]


@pytest.mark.parametrize("gpu_gib", [23.63, 1.8])
def test_fix_writes_valid_deepspeed_configurations(tiny_runs, tmp_path, gpu_gib):
    pretrain, finetune = project_checks.write_configs_that_fit(tiny_runs, Machine(1, gpu_gib, 62.6), tmp_path)
    assert f"wrote {tmp_path / 'deepspeed_pretrain.json'}: " in pretrain
    [name, micro] = re.search(r"set finetune's deepspeed: (\w+), micro_batch_size: (\d+)", finetune).groups()
    written = read_json(tmp_path / "deepspeed_finetune.json")
    assert written["zero_optimization"]["stage"] == read_deepspeed(name, "")["zero_optimization"]["stage"]
    sizes = [written[f"train_{size}"] for size in ("batch_size", "micro_batch_size_per_gpu")]
    assert sizes == [128, int(micro)] and sizes[0] == sizes[1] * written["gradient_accumulation_steps"]
    filled = written | {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "gradient_clipping": 1.0}
    assert DeepSpeedConfig(filled).train_batch_size == 128


def test_fix_reports_that_no_configuration_fits(tiny_runs, tmp_path):
    printed = list(project_checks.write_configs_that_fit(tiny_runs, Machine(1, 0.01, 62.6), tmp_path / "none"))
    assert [sentence.split(":")[0] for sentence in printed] == [
        f"no DeepSpeed configuration fits {stage}" for stage in ("pretrain", "finetune")
    ]
    assert not (tmp_path / "none").exists()


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


def test_doctor_prints_json_and_exits_with_1_on_failure():
    done = doctor("--json", "--config", '{"modle": "tiny"}')
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1 and findings["configuration"]["status"] == "fail"
    assert findings["torch"]["status"] == "pass"
    assert "checking PyTorch and its kernels" in done.stderr, "a person sees what takes long"
    assert findings["DeepSpeed CPUAdam"]["status"] in ("pass", "skip")
    assert all(set(finding) == {"name", "status", "reason", "remedy"} for finding in findings.values())
