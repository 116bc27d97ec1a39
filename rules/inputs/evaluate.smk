# Input functions of rules/evaluate.smk.
import os


def pretrained_flags(wildcards):
    """Params function: the flag for stage 1's folder, if there is one."""
    projector = projector_file(wildcards)
    return [f"--pretrained={os.path.dirname(projector)}"] if projector else []
