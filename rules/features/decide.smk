# Run more seeds of an experiment and of its opponents until each verdict is decided: `snakemake decide --config
# experiment=dj_synth`. Seeds are ordinary runs. The look after each seed is a checkpoint, because it decides whether
# another seed is needed. Each opponent has looks of its own: the baseline's in decide/, others' in a subfolder.
from dj2mgm.features.decide import looks
from dj2mgm.runs.pages import build_power_settings, find_decisive_score
from dj2mgm.settings.targets import MIN_SEEDS

DECISION = f"results/{RESULTS_PREFIX}{{decided}}/decide"
LOOK = f"{DECISION}{{against}}/seeds-{{number}}"


wildcard_constraints:
    decided=match_any(EXPERIMENTS),
    against=f"(/{match_any(RUNS.experiments.configs)})?",


def look_arguments(wildcards):
    """Return the runs, the experiment, its opponent and the number of seeds of a look."""
    opponent = looks.find_opponent(wildcards.against)
    return RUNS, wildcards.decided, opponent, int(wildcards.number)


SETTINGS_FILES["configure_look"] = SettingsFile(
    f"{LOOK}/config.yaml", lambda w: looks.build_look_settings(*look_arguments(w))
)
SETTINGS_FILES["configure_decision"] = SettingsFile(
    f"{DECISION}/budget.yaml",
    lambda w: RUNS.shared.decide.model_dump(exclude={"against"}),
)


def earlier_looks(wildcards):
    """Input function: the looks after fewer seeds."""
    numbers = range(MIN_SEEDS, int(wildcards.number))
    return expand(f"{LOOK}/look.yaml", **{**wildcards, "number": numbers})


# The budget is ancient, so that a new budget does not repeat earlier looks.
checkpoint take_look:
    input:
        lambda w: looks.list_look_inputs(*look_arguments(w)),
        earlier=earlier_looks,
        config=f"{LOOK}/config.yaml",
        budget=ancient(f"{DECISION}/budget.yaml"),
        code=list_script_files("take_look.py"),
    output:
        f"{LOOK}/look.yaml",
    log:
        f"{LOOK}/take_look.log",
    benchmark:
        f"{LOOK}/take_look.benchmark.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    params:
        earlier=optional_flags("earlier", "--earlier"),
    shell:
        build_stage_command(
            "take_look.py --config {input.config:q} --budget {input.budget:q} {params.earlier:q}"
            " --output {output:q}"
        )


def budget_file(wildcards):
    """Input function: the budget of the decisions about the experiment that the configuration names."""
    experiment = looks.check_decidable(RUNS)
    for name in (experiment, *RUNS.shared.decide.against):
        target_files(name)(wildcards)
    return f"results/{looks.locate_decision_folder(RUNS, experiment)}/budget.yaml"


def all_looks(wildcards):
    """Input function: all looks up to the last one at each opponent; after each, Snakemake calls it again."""
    budget_file(wildcards)

    def look_file(opponent, number):
        return checkpoints.take_look.get(
            decided=RUNS.shared.experiment[0],
            against=looks.name_subfolder(opponent),
            number=number,
        ).output[0]

    return looks.list_looks(RUNS, look_file)


# It has no output, so that it prints the decisions and writes their pages at every request.
rule decide:
    input:
        looks=all_looks,
        budget=budget_file,
        templates=list_templates("variants*.j2"),
    log:
        "results/decide/decide.log",
    localrule: True
    conda:
        "../../envs/report.yaml"
    shell:
        f"python {quote_script_path('write_decision.py')} --budget {{input.budget:q}}"
        " --looks {input.looks:q} 2> {log:q}"


SETTINGS_FILES["configure_power"] = SettingsFile(
    "results/plan/power.yaml",
    lambda w: build_power_settings(RUNS) | {"headline": find_decisive_score(RUNS)},
    needs=planned_dataset,
)
PLAN_TEXTS.append("results/plan/power.txt")


# Its settings name the finished runs. They are not inputs, because a plan must not run them again.
rule plan_power:
    input:
        config="results/plan/power.yaml",
        code=list_script_files("plan_power.py"),
    output:
        "results/plan/power.txt",
    log:
        "results/plan/plan_power.log",
    localrule: True
    conda:
        "../../envs/report.yaml"
    shell:
        build_stage_command(
            "plan_power.py --config {input.config:q} --output {output:q}"
        )
