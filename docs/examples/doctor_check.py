"""Check of the number of processor cores.

Copied into workflow_scripts/dj2mgm/health/host_checks.py; `run_checks` in health/doctor_checks.py then lists
`host_checks.check_cores(host)`.
"""

from dj2mgm.health.probes import Finding, HostProbe

CORES_FEW = 2  # the data loader decodes images while the model trains


def check_cores(host: HostProbe) -> Finding:
    name, reason = "cores", f"{host.cores} for this process"
    if host.cores < CORES_FEW:
        remedy = f"ask for more: docker run --cpus={CORES_FEW}, or Slurm's --cpus-per-task={CORES_FEW}"
        return Finding(name, "warn", f"{reason}; decoding images slows training down", remedy)
    return Finding(name, "pass", reason)
