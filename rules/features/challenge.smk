# Published benchmarks, from the user's files, and the challenge's score.
from dj2mgm.errors import InputError
from dj2mgm.features.challenge.challenge_keys import (
    list_benchmark_files,
    read_declarations,
)
from dj2mgm.features.challenge.challenge_stages import build_challenge_settings

SETTINGS_FILES["configure_challenge"] = SettingsFile(
    f"results/{RESULTS_PREFIX}challenge/config.yaml",
    lambda w: build_challenge_settings(RUNS),
)
BENCHMARK_FILES |= list_benchmark_files(RUNS.shared)
WITH_SUBMISSION = [
    name for name, declared in read_declarations().items() if declared.has_submission
]


wildcard_constraints:
    benchmarks="(base_)?benchmarks",
    benchmark=match_any(read_declarations()),


def benchmark_files(wildcards):
    """Input function: the user's own files of a benchmark, without the folder of its images."""
    settings = RUNS.by_folder(wildcards.run).settings.get(
        f"benchmarks/{wildcards.benchmark}"
    )
    if settings is None:
        raise InputError(
            f"benchmarks.{wildcards.benchmark} is not set: name its files in config/config.yaml"
        )
    files = settings.files
    return check_user_files(file for kind, file in files.items() if kind != "images")


def benchmark_images(wildcards):
    """Params function: a digest of the images that a benchmark's files name."""
    settings = RUNS.by_folder(wildcards.run).settings.get(
        f"benchmarks/{wildcards.benchmark}"
    )
    files = settings.files if settings else {}
    folder = files.get("images")
    return FINGERPRINTS.hash_images(
        (file, folder) for kind, file in files.items() if folder and kind != "images"
    )


rule answer_benchmark:
    input:
        model_files,
        benchmark_files,
        answering_weights("benchmarks"),
        config="results/{run}/{benchmarks}/{benchmark}/config.yaml",
        code=list_script_files("answer_benchmark.py"),
    output:
        answers="results/{run}/{benchmarks}/{benchmark}/answers.jsonl",
    log:
        "results/{run}/{benchmarks}/{benchmark}/answer_benchmark.log",
    benchmark:
        "results/{run}/{benchmarks}/{benchmark}/answer_benchmark.benchmark.tsv"
    conda:
        "../../envs/evaluate.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **stage_resources(MODEL_STAGE_MB, minutes=240),
        gpu=single_node_gpus,
    params:
        content=hash_user_files(model_files, benchmark_files),
        images=benchmark_images,
        model=model_folder,
        finetuned=finetuned_flags("benchmarks"),
    shell:
        build_stage_command(
            "answer_benchmark.py --config {input.config:q} --model={params.model:q}"
            " {params.finetuned:q}"
            " --output-dir results/{wildcards.run:q}/{wildcards.benchmarks:q}/{wildcards.benchmark:q}"
        )


rule score_benchmark:
    input:
        answers="results/{run}/{benchmarks}/{benchmark}/answers.jsonl",
        leaks=leaks_file,
        code=list_script_files("score_benchmark.py"),
    output:
        metrics="results/{run}/{benchmarks}/{benchmark}/metrics.json",
    log:
        "results/{run}/{benchmarks}/{benchmark}/score_benchmark.log",
    benchmark:
        "results/{run}/{benchmarks}/{benchmark}/score_benchmark.benchmark.tsv"
    conda:
        "../../envs/evaluate.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    params:
        leaks=optional_flags("leaks", "--leaks"),
    shell:
        build_stage_command(
            "score_benchmark.py --answers {input.answers:q} {params.leaks:q}"
            " --output-dir results/{wildcards.run:q}/{wildcards.benchmarks:q}/{wildcards.benchmark:q}"
        )


rule write_submission:
    input:
        answers="results/{run}/benchmarks/{benchmark}/answers.jsonl",
        code=list_script_files("write_submission.py"),
    output:
        submission="results/{run}/benchmarks/{benchmark}/submission.xlsx",
    log:
        "results/{run}/benchmarks/{benchmark}/write_submission.log",
    benchmark:
        "results/{run}/benchmarks/{benchmark}/write_submission.benchmark.tsv"
    wildcard_constraints:
        benchmark=match_any(WITH_SUBMISSION),
    conda:
        "../../envs/evaluate.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    shell:
        build_stage_command(
            "write_submission.py --answers {input.answers:q}"
            " --output-dir results/{wildcards.run:q}/benchmarks/{wildcards.benchmark:q}"
        )


def list_challenge_files(names, file):
    """Return a file of each of these benchmarks that the challenge scores, for every run in its table.

    A model before training submits nothing.
    """
    settings = build_challenge_settings(RUNS)
    return sorted(
        {
            f"{run['benchmarks'][name]}/{file}"
            for name in settings["scores"]
            for run in settings["runs"]
            if name in names and (run["seed"] is not None or file != "submission.xlsx")
        }
    )


rule score_challenge:
    input:
        lambda w: list_challenge_files(read_declarations(), "metrics.json"),
        config=f"results/{RESULTS_PREFIX}challenge/config.yaml",
        code=list_script_files("score_challenge.py"),
    output:
        table=report(
            f"results/{RESULTS_PREFIX}challenge/challenge.csv",
            caption="../../workflow_scripts/dj2mgm/features/challenge/challenge.rst",
            category="Challenge",
            labels={"table": "challenge"},
        ),
    log:
        f"results/{RESULTS_PREFIX}challenge/score_challenge.log",
    benchmark:
        f"results/{RESULTS_PREFIX}challenge/score_challenge.benchmark.tsv"
    conda:
        "../../envs/report.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    params:
        folder=subpath(output.table, parent=True),
    shell:
        build_stage_command(
            "score_challenge.py --config {input.config:q} --output-dir {params.folder:q}"
        )


rule challenge:
    input:
        f"results/{RESULTS_PREFIX}challenge/challenge.csv",
        lambda w: list_challenge_files(WITH_SUBMISSION, "submission.xlsx"),
    localrule: True
