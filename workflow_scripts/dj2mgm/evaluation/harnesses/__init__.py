"""Other people's tools that evaluate models, and how this workflow's models take part in them.

lmms_tasks    tasks of lmms-eval, as questions and metrics: what the rules of `snakemake evaluate` use
lmms_model    `--model dj2mgm` of lmms-eval's own command
vlmevalkit    a model of VLMEvalKit
"""


def lmms_manifest():
    """What the entry point in workflow_scripts/dj2mgm-1.dist-info hands to lmms-eval while that is being imported."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("dj2mgm", simple_class_path="dj2mgm.evaluation.harnesses.lmms_model.Dj2mgm")
