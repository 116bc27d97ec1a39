"""Adapters to the evaluation tool lmms-eval.

lmms_tasks    tasks of lmms-eval as questions and metrics, for the rules of `snakemake evaluate`
lmms_model    `--model dj2mgm` of lmms-eval's own command
"""
