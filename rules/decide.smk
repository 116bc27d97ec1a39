# Run more seeds of an experiment and of the reference until the verdict is decided: `snakemake decide --config
# experiment=dj_synth`. Seeds are ordinary runs. The look after each seed is a checkpoint, because it decides whether
# another seed is needed.


include: "inputs/decide.smk"


DECISION = f"results/{RESULTS_PREFIX}{{decided}}/decide"
LOOK = f"{DECISION}/seeds-{{number}}"


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
