"""Every failure that the workflow knows, by family. docs/troubleshooting.md has a section for each."""

from diagnostics.signatures import cuda, data, deepspeed, gpu_memory, signals, storage, weights

FAMILIES = (gpu_memory, signals, cuda, deepspeed, data, storage, weights)
SIGNATURES = tuple(signature for family in FAMILIES for signature in family.SIGNATURES)
