# Run adaptive studies: Optuna proposes a batch of trials, which are ordinary runs, and learns from their scores. Both
# rules are checkpoints: from their outputs, Snakemake learns the runs of a batch and whether another batch follows.


include: "inputs/search.smk"


SEARCH = f"results/{RESULTS_PREFIX}{{study}}/search/{{key}}"
BATCH = f"{SEARCH}/batch-{{number}}"


# The study's file is ancient, so that a new budget does not repeat earlier batches.
checkpoint ask_trials:
    input:
        scores=earlier_scores,
        search=f"{SEARCH}/search.yaml",
        study=ancient(study_budget_file),
        code=list_script_files("ask_trials.py"),
    output:
        f"{BATCH}/trials.yaml",
    log:
        f"{BATCH}/ask_trials.log",
    benchmark:
        f"{BATCH}/ask_trials.benchmark.tsv"
    wildcard_constraints:
        number="[1-9][0-9]*",
    conda:
        "../envs/search.yaml"
    resources:
        mem_mb=mem_with_retries(SCRIPT_MB),
        runtime=30,
    shell:
        build_stage_command(
            "ask_trials.py",
            "--search {input.search:q} --study {input.study:q} --scores {input.scores:q} --output {output:q}",
        )


checkpoint score_trials:
    input:
        scored_files,
        trials=batch_trials,
        earlier=earlier_scores,
        rows=reference_rows,
        study=ancient(study_budget_file),
        config=f"{BATCH}/config.yaml",
        code=list_script_files("score_trials.py"),
    output:
        f"{BATCH}/scores.yaml",
    log:
        f"{BATCH}/score_trials.log",
    benchmark:
        f"{BATCH}/score_trials.benchmark.tsv"
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=mem_with_retries(SMALL_STAGE_MB),
        runtime=30,
    params:
        trials=trials_flag,
    shell:
        build_stage_command(
            "score_trials.py",
            "--config {input.config:q} --study {input.study:q} --rows {input.rows:q} {params.trials:q} --output {output:q}",
        )
