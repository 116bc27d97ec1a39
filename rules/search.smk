# Run adaptive studies: Optuna proposes a batch of trials, which are ordinary runs, and learns from their scores. Both
# rules are checkpoints: from their outputs, Snakemake learns the runs of a batch and whether another batch follows.
from dj2mgm.runs.studies import search_batches
from dj2mgm.runs.studies.study_designs import locate_study_file

SEARCH = f"results/{RESULTS_PREFIX}{{study}}/search/{{key}}"


BATCH = f"{SEARCH}/batch-{{number}}"


def study_budget_file(wildcards):
    """Input function: the file with the budget of a search."""
    return locate_study_file(wildcards.study)


def earlier_scores(wildcards):
    """Input function: the scores of the batches before a batch."""
    return search_batches.list_score_files(
        find_requested_search(wildcards), int(wildcards.number)
    )


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


def batch_trials(wildcards):
    """Input function: the trials of a batch; none for batch 0, the experiment that they change."""
    if wildcards.number == "0":
        return []
    trials = checkpoints.ask_trials.get(**wildcards).output[0]
    RUNS.add_late_variants(wildcards.study)
    return trials


def reference_rows(wildcards):
    """Input function: the number of rows that the baseline's recipe keeps."""
    return search_batches.locate_reference_summary(RUNS)


def scored_files(wildcards):
    """Input function: the files that the scores of a batch are read from."""
    batch_trials(wildcards)
    with raising_user_errors():
        return search_batches.list_batch_files(
            RUNS, find_requested_search(wildcards), int(wildcards.number)
        )


checkpoint score_trials:
    input:
        scored_files,
        trials=batch_trials,
        rows=reference_rows,
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
        trials=optional_flag("--trials", "trials"),
    shell:
        build_stage_command(
            "score_trials.py",
            "--config {input.config:q} --rows {input.rows:q} {params.trials:q} --output {output:q}",
        )
