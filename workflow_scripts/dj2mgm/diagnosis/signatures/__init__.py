"""Known failures by family; docs/troubleshooting.md has a section for each."""

from dj2mgm.diagnosis.signatures import cuda, files, gpu_memory, signals, system

FAMILIES = (gpu_memory, signals, cuda, files, system)
SIGNATURES = tuple(signature for family in FAMILIES for signature in family.SIGNATURES)
