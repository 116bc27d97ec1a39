"""Known failures by family; docs/troubleshooting.md has a section for each."""

from dj2mgm.diagnosis.signatures import cuda, cuda_memory, file_system, signals, system

FAMILIES = (cuda_memory, signals, cuda, file_system, system)
SIGNATURES = tuple(signature for family in FAMILIES for signature in family.SIGNATURES)
