"""The checks of the doctor, in the order in which it prints them, and those of configuration and models.

`snakemake check` checks the data, and `snakemake plan` the memory and the disk of a training.
"""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dj2mgm.errors import InputError, pluralize
from dj2mgm.health import machine_checks
from dj2mgm.health.machine_checks import Finding
from dj2mgm.health.probes import end_orphans, probe_cuda, probe_driver, probe_host, run_probe
from dj2mgm.health.torch_probe import TorchProbe
from dj2mgm.model_files.missing_models import describe_downloads, describe_missing, find_downloads, find_missing_models
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import find_variant_sources
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
    begin("configuration and models")
    runs, configuration = read_runs(config)
    if fix:
        machine_checks.write_environment(machine_checks.build_environment_variables(cuda, torch and torch.cuda))
        print(f"wrote {machine_checks.ENVIRONMENT_FILE}; source it before `snakemake`", file=sys.stderr)
    return [
        machine_checks.check_driver(driver),
        machine_checks.check_torch(output, driver),
        machine_checks.check_toolkit(cuda, torch, driver),
        machine_checks.check_matmul(torch),
        machine_checks.check_bf16(torch),
        machine_checks.check_fp8(torch, list_fp8_stages(runs)),
        machine_checks.check_nccl(torch),
        machine_checks.check_flash_attention(torch),
        machine_checks.check_locks(locks),
        machine_checks.check_extension(extension),
        machine_checks.check_gpu_processes(driver),
        machine_checks.check_memory(host),
        machine_checks.check_cgroup(host),
        machine_checks.check_shared_memory(host, count_loader_workers(runs)),
        machine_checks.check_disk(host),
        machine_checks.check_ulimits(host),
        machine_checks.check_loopback(host),
        configuration,
        *(check_models(runs) if runs else ()),
    ]


def read_runs(command_line: dict) -> tuple[Runs | None, Finding]:
    """Return the configuration (None if it is invalid) and a finding about it."""
    name = "configuration"
    try:
        runs = Runs(command_line, find_variant_sources())
    except InputError as error:
        return None, Finding(name, "fail", str(error), "correct that file or key")
    if warnings := runs.experiments.list_warnings():
        return runs, Finding(name, "warn", "; ".join(warnings), "correct these files")
    names = runs.experiments.names
    return runs, Finding(name, "pass", f"{pluralize(len(names), 'experiment')}: {', '.join(names)}")


def list_fp8_stages(runs: Runs | None) -> set[str]:
    all_runs = runs or ()
    return {stage for run in all_runs for stage in run.training_stages if run.settings[stage].precision == "fp8"}


def count_loader_workers(runs: Runs | None) -> int:
    """Return the largest number of data loader processes of any stage."""
    if runs is None:
        return 0
    return max(run.settings[stage].workers for run in runs for stage in run.training_stages)


def check_models(runs: Runs) -> Iterator[Finding]:
    """Yield a finding for each model: its folders exist, or its parts come with the workflow, or are trained by it."""
    for model in {run.config.model.name: run.config.model for run in runs}.values():
        name = f"model {model.name}"
        if model.trained_by_workflow:
            is_shipped = model.trained_parts.name in runs.shipped_foundations
            yield Finding(name, "skip", "its parts come with the workflow" if is_shipped else "the workflow trains it")
            continue
        missing = find_missing_models(model)
        if missing:
            reason = "; ".join(dict.fromkeys(describe_missing(key, part) for key, part in missing.items()))
            argument = shlex.quote(f"model={model.name}")
            remedy = f"run snakemake fetch --config {argument}" if find_downloads(model, missing) else ""
            if remedy and (facts := describe_downloads(model, missing)):
                remedy += f", which downloads {facts}"
            yield Finding(name, "fail", reason, remedy or "correct the model's file; see docs/models.md")
        else:
            yield Finding(name, "pass", "all its folders and weights exist")
