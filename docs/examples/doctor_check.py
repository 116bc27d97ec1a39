"""Check of the number of processor cores.

Copied into workflow_scripts/dj2mgm/health/doctor_checks.py; `run_checks` then lists `check_cores(host)`.
"""

from dj2mgm.health.doctor_checks import Finding
from dj2mgm.health.probes import HostProbe

MIN_CORES = 2  # the data loader decodes images while the model trains


def check_cores(host: HostProbe) -> Finding:
    name, reason = "cores", f"{host.cores} for this process"
    if host.cores < MIN_CORES:
        remedy = f"ask for more: docker run --cpus={MIN_CORES}, or Slurm's --cpus-per-task={MIN_CORES}"
        return Finding(name, "warn", f"{reason}; decoding images slows training down", remedy)
    return Finding(name, "pass", reason)
