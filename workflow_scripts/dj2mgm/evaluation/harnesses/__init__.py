"""Other people's tools that evaluate models, and how this workflow's models take part in them.

lmms_tasks    tasks of lmms-eval, as questions and metrics: what the rules of `snakemake evaluate` use
lmms_model    `--model dj2mgm` of lmms-eval's own command
vlmevalkit    a model of VLMEvalKit
"""
