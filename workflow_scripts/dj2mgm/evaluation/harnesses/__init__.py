"""Adapters to the evaluation tools lmms-eval and VLMEvalKit.

lmms_tasks    tasks of lmms-eval as questions and metrics, for the rules of `snakemake evaluate`
lmms_model    `--model dj2mgm` of lmms-eval's own command
vlmevalkit    this workflow's models in VLMEvalKit
"""
