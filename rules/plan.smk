# Plan before a training: memory, time and disk on this machine or another one.
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.command_messages import build_plan_settings

PLAN_TEXTS = []  # files of text that features add to the plan


def planned_parts(wildcards):
    """Input function: the trained parts of the planned model, if it is tiny."""
    model = find_requested_run("plan", REFERENCE).config.model
    return list_foundation_files(model.name)


def planned_dataset(wildcards):
    """Input function: the counts of the user's own data, whose sizes decide; rendered scenes are not made for a plan."""
    dataset = find_requested_run("plan", REFERENCE).dataset
    folder = f"results/datasets/{dataset.name}"
    return [] if dataset.settings.is_rendered else f"{folder}/summary.json"


def plan_settings(wildcards):
    """Return the settings of the plan of the requested experiment."""
    run = find_requested_run("plan", REFERENCE)
    return build_plan_settings(RUNS, run, workflow.config_settings.config_args or ())


SETTINGS_FILES["configure_plan"] = SettingsFile(
    "results/plan/config.yaml", plan_settings, needs=planned_dataset
)


# It has no output, so that it prints the plan at every request.
rule plan:
    input:
        planned_parts,
        config="results/plan/config.yaml",
        texts=lambda w: PLAN_TEXTS,
    log:
        "results/plan/plan.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        texts=optional_flags("texts", "--text"),
    message:
        "tracing training steps without weights and data, about half a minute"
    shell:
        f"python {quote_script_path('plan_memory.py')} --config {{input.config:q}} {{params.texts:q}} 2> {{log:q}}"
