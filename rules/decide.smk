# Run more seeds of an experiment and of the reference until the verdict is decided: `snakemake decide --config
# experiment=dj_synth`. Seeds are ordinary runs. The look after each seed is a checkpoint, because it decides whether
# another seed is needed.
from dj2mgm.runs.studies import looks

DECISION = f"results/{RESULTS_PREFIX}{{decided}}/decide"


LOOK = f"{DECISION}/seeds-{{number}}"


def locate_look_file(experiment, number):
    """Return the file of the look after a number of seeds."""
    return f"results/{looks.locate_decision_folder(RUNS, experiment)}/seeds-{number}/look.yaml"


def earlier_looks(wildcards):
    """Input function: the looks after fewer seeds."""
    numbers = range(looks.MIN_SEEDS, int(wildcards.number))
    return [locate_look_file(wildcards.decided, number) for number in numbers]


def look_inputs(wildcards):
    """Input function: the results of both sides that a look reads."""
    with raising_user_errors():
        return looks.list_look_inputs(RUNS, wildcards.decided, int(wildcards.number))


# The budget is ancient, so that a new budget does not repeat earlier looks.
checkpoint take_look:
    input:
        look_inputs,
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
        "../envs/report.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=30,
    params:
        earlier=optional_flag("--earlier", "earlier"),
    shell:
        build_stage_command(
            "take_look.py",
            "--config {input.config:q} --budget {input.budget:q} {params.earlier:q} --output {output:q}",
        )


def budget_file(wildcards):
    """Input function: the budget of the decision about the experiment that the configuration names."""
    with raising_user_errors():
        experiment = looks.check_decidable(RUNS)
    target_files(experiment)(wildcards)
    return f"results/{looks.locate_decision_folder(RUNS, experiment)}/budget.yaml"


def all_looks(wildcards):
    """Input function: all looks up to the last one; after each of them, Snakemake calls it again."""
    budget_file(wildcards)

    def file_after(number):
        return checkpoints.take_look.get(
            decided=RUNS.shared.experiment[0], number=number
        ).output[0]

    with raising_user_errors():
        return looks.list_looks(RUNS, file_after)


# It has no output, so that it prints the decision and writes its page at every request.
rule decide:
    input:
        looks=all_looks,
        budget=budget_file,
        templates=list_templates("variants*.j2"),
    log:
        "results/decide/decide.log",
    localrule: True
    conda:
        "../envs/report.yaml"
    params:
        folder=subpath(input.budget, parent=True),
    shell:
        f"python {quote_script_path('write_decision.py')} --budget {{input.budget:q}}"
        " --output-dir {params.folder:q} --looks {input.looks:q} 2> {log:q}"
