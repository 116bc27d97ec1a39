# Compare the variants of each file in config/studies, and run its searches: Optuna proposes a batch of trials, which are
# ordinary runs, and learns from their scores. From the outputs of both checkpoints, Snakemake learns the runs of a batch
# and whether another batch follows.
from dj2mgm.errors import InputError
from dj2mgm.features.studies import study_inputs
from dj2mgm.features.studies.studies_variants import Study
from dj2mgm.runs import pages
from dj2mgm.runs.stage_settings import count_gpus_per_node

STUDIES = [
    name
    for name, source in RUNS.experiments.sources.items()
    if isinstance(source, Study) and name not in RUNS.experiments.errors
]
STUDY = f"results/{RESULTS_PREFIX}{{study}}"
SEARCH = f"{STUDY}/search/{{key}}"
BATCH = f"{SEARCH}/batch-{{number}}"


wildcard_constraints:
    study=match_any(STUDIES),
    key="[0-9a-f]+",


def find_requested_search(wildcards):
    """Return the search of a study; fail if the requested files were made with earlier settings of the search."""
    search = study_inputs.find_study(RUNS, wildcards.study).search
    if search is None or search.key != wildcards.key:
        raise InputError(
            f"{wildcards.study}: the settings of its search have changed since; request `snakemake {wildcards.study}` instead"
        )
    return search


def all_scores(study):
    """Return the input function of the scores of all batches of a search; no files if the study is not a search.

    Snakemake does not create a missing input if the study's page is newer than the other inputs, so the target requests
    these files itself.
    """

    def get(checkpoint, search, number):
        return checkpoint.get(study=study, key=search.key, number=number).output[0]

    def scores(wildcards):
        return study_inputs.take_batches(
            RUNS,
            study,
            lambda *batch: get(checkpoints.ask_trials, *batch),
            lambda *batch: get(checkpoints.score_trials, *batch),
        )

    return scores


SETTINGS_FILES["configure_study"] = SettingsFile(
    f"{STUDY}/config.yaml",
    lambda w: study_inputs.build_study_settings(RUNS, w.study),
    needs=lambda w: all_scores(w.study)(w),
)
SETTINGS_FILES["configure_search"] = SettingsFile(
    f"{SEARCH}/search.yaml", lambda w: find_requested_search(w).model_dump()
)
SETTINGS_FILES["configure_batch"] = SettingsFile(
    f"{BATCH}/config.yaml",
    lambda w: study_inputs.build_batch_settings(
        RUNS, w.study, find_requested_search(w), int(w.number)
    ),
)
SETTINGS_FILES["configure_mixtures"] = SettingsFile(
    f"{STUDY}/merged/config.yaml",
    lambda w: study_inputs.build_merge_settings(RUNS, w.study).model_dump(),
)


def earlier_scores(wildcards):
    """Input function: the scores of the batches before a batch."""
    return study_inputs.list_score_files(
        find_requested_search(wildcards), int(wildcards.number)
    )


# The study's file is ancient, so that a new budget does not repeat earlier batches.
checkpoint ask_trials:
    input:
        scores=earlier_scores,
        search=f"{SEARCH}/search.yaml",
        study=ancient(lambda w: RUNS.experiments.sources[w.study].file),
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
        "../../envs/search.yaml"
    resources:
        **stage_resources(SCRIPT_MB, minutes=30),
    shell:
        build_stage_command(
            "ask_trials.py --search {input.search:q} --study {input.study:q}"
            " --scores {input.scores:q} --output {output:q}"
        )


def batch_trials(wildcards):
    """Input function: the trials of a batch; none for batch 0, the experiment that they change."""
    if wildcards.number == "0":
        return []
    trials = checkpoints.ask_trials.get(**wildcards).output[0]
    RUNS.add_late_variants(wildcards.study)
    return trials


def scored_files(wildcards):
    """Input function: the files that the scores of a batch are read from."""
    batch_trials(wildcards)
    return study_inputs.list_batch_files(
        RUNS, find_requested_search(wildcards), int(wildcards.number)
    )


checkpoint score_trials:
    input:
        scored_files,
        trials=batch_trials,
        rows=lambda w: study_inputs.locate_reference_summary(RUNS),
        config=f"{BATCH}/config.yaml",
        code=list_script_files("score_trials.py"),
    output:
        f"{BATCH}/scores.yaml",
    log:
        f"{BATCH}/score_trials.log",
    benchmark:
        f"{BATCH}/score_trials.benchmark.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    params:
        trials=optional_flags("trials", "--trials"),
    shell:
        build_stage_command(
            "score_trials.py --config {input.config:q} --rows {input.rows:q} {params.trials:q}"
            " --output {output:q}"
        )


def compared_files(wildcards):
    """Input function: the files that a study's page reads, with the scores of its merged models."""
    files = list(all_scores(wildcards.study)(wildcards))
    experiments = study_inputs.list_study_experiments(RUNS, wildcards.study)
    files += pages.list_page_files(RUNS, experiments)
    if merged_scores := study_inputs.locate_scores_file(RUNS, wildcards.study):
        # called only for its errors, which are then reported before anything runs
        study_inputs.build_merge_settings(RUNS, wildcards.study)
        files.append(merged_scores)
    return files


rule compare_study:
    input:
        compared_files,
        config=f"{STUDY}/config.yaml",
        templates=list_templates("variants*.j2", feature="studies"),
        code=list_script_files("compare_study.py"),
    output:
        page=report(
            f"{STUDY}/{{study}}.html",
            caption="../../workflow_scripts/dj2mgm/features/studies/study.rst",
            category="Studies",
            labels={"page": "{study}"},
        ),
        table=f"{STUDY}/{{study}}.csv",
    log:
        f"{STUDY}/compare_study.log",
    benchmark:
        f"{STUDY}/compare_study.benchmark.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    params:
        folder=subpath(output.table, parent=True),
    shell:
        build_stage_command(
            "compare_study.py --config {input.config:q} --output-dir {params.folder:q}"
        )


def find_merged_run(wildcards):
    """Return the first run of the experiment whose mixtures are merged."""
    return RUNS.first_seed(RUNS.experiments.sources[wildcards.study].experiment)


def merged_model_files(wildcards):
    """Input function: the model that the merged LoRAs were trained from."""
    return list_model_files(find_merged_run(wildcards).config.model)


def merged_adapters(wildcards):
    """Input function: the weights of stage 2 of each source alone."""
    folders = study_inputs.build_merge_settings(RUNS, wildcards.study).sources.values()
    names = find_merged_run(wildcards).stage_2_weights
    return [f"{folder}/{name}" for folder in folders for name in names]


# Mixtures of sources are not trained here: the LoRAs of single sources are merged, and the merged models are scored.
rule score_mixtures:
    input:
        merged_model_files,
        adapters=merged_adapters,
        config=f"{STUDY}/merged/config.yaml",
        generate=lambda w: RUNS.locate_output(
            find_merged_run(w), "generate", "config.yaml"
        ),
        evaluation=lambda w: f"results/datasets/{find_merged_run(w).dataset.name}/evaluation.jsonl",
        code=list_script_files("score_mixtures.py"),
    output:
        f"{STUDY}/merged/scores.yaml",
    log:
        f"{STUDY}/merged/score_mixtures.log",
    benchmark:
        f"{STUDY}/merged/score_mixtures.benchmark.tsv"
    conda:
        "../../envs/evaluate.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **stage_resources(MODEL_STAGE_MB, minutes=1440),
        gpu=lambda w: count_gpus_per_node(find_merged_run(w).config),
    params:
        content=hash_user_files(merged_model_files),
        model=lambda w: find_merged_run(w).config.model.folder,
        folder=subpath(output[0], parent=True),
    shell:
        build_stage_command(
            "score_mixtures.py --config {input.config:q} --generate-config {input.generate:q}"
            " --model={params.model:q} --evaluation {input.evaluation:q}"
            " --output-dir {params.folder:q}"
        )


for name in STUDIES:

    rule:
        name:
            name
        input:
            target_files(name, f"results/{RESULTS_PREFIX}{name}/{name}.html"),
            all_scores(name),
        localrule: True
