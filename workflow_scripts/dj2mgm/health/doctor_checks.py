"""The checks of the doctor, in the order in which it prints them."""

import sys
from collections.abc import Callable
from pathlib import Path

from dj2mgm.health import gpu_checks, host_checks, project_checks
from dj2mgm.health.cuda_probe import probe_cuda
from dj2mgm.health.driver_probe import end_orphans, probe_driver
from dj2mgm.health.environment_file import ENVIRONMENT_FILE, build_environment_variables, write_environment
from dj2mgm.health.findings import Finding
from dj2mgm.health.host_probe import probe_host
from dj2mgm.health.probe_process import run_probe
from dj2mgm.health.torch_probe import TorchProbe
from dj2mgm.planning.prediction import read_free_memory
from dj2mgm.training.build_locks import find_stale_locks

TORCH_LIMIT_S = 180
COMPILE_LIMIT_S = 900


def run_checks(config: dict, fix: bool, end_stray: bool, begin: Callable[[str], None]) -> list[Finding]:
    """Probe the machine once and run all checks; `begin` is called with the name of each long part."""
    begin("driver, CUDA and host")
    driver, cuda, host = probe_driver(), probe_cuda(), probe_host(Path("results"))
    if end_stray and (ended := end_orphans(driver.processes)):
        print(f"ended {', '.join(map(str, ended))}", file=sys.stderr)
        driver = probe_driver()
    begin("PyTorch and its kernels")
    output = run_probe("dj2mgm.health.torch_probe", TORCH_LIMIT_S, "torch")
    torch = TorchProbe(**output.values) if output.values else None
    begin("DeepSpeed's optimizer, which is compiled once, in a minute or two")
    locks = find_stale_locks()
    extension = None if locks else run_probe("dj2mgm.health.torch_probe", COMPILE_LIMIT_S, "deepspeed")
    begin("configuration, data and training plans")
    runs, configuration = project_checks.read_runs(config)
    machine = read_free_memory(len(driver.gpus))
    if fix:
        write_environment(build_environment_variables(cuda, torch and torch.cuda))
        print(f"wrote {ENVIRONMENT_FILE}; source it before `snakemake`", file=sys.stderr)
        for sentence in project_checks.write_configs_that_fit(runs, machine) if runs else ():
            print(sentence, file=sys.stderr)
    return [
        gpu_checks.check_driver(driver),
        gpu_checks.check_torch(output, driver),
        gpu_checks.check_toolkit(cuda, torch, driver),
        gpu_checks.check_matmul(torch),
        gpu_checks.check_bf16(torch),
        gpu_checks.check_fp8(torch, project_checks.list_fp8_stages(runs)),
        gpu_checks.check_nccl(torch),
        gpu_checks.check_flash_attention(torch),
        gpu_checks.check_locks(locks),
        gpu_checks.check_extension(extension),
        gpu_checks.check_gpu_processes(driver),
        host_checks.check_memory(host, bool(driver.gpus)),
        host_checks.check_swap(host, bool(driver.gpus) and project_checks.trains_fully(runs)),
        host_checks.check_cgroup(host),
        host_checks.check_shared_memory(host, project_checks.count_loader_workers(runs)),
        host_checks.check_disk(host, project_checks.predict_needed_disk(runs)),
        host_checks.check_ulimits(host),
        host_checks.check_loopback(host),
        configuration,
        *(project_checks.check_data(runs) if runs else ()),
        *(project_checks.check_models(runs) if runs else ()),
        *(project_checks.check_plans(runs, machine) if runs else ()),
    ]
