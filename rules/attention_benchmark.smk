# Time and memory of eager attention, SDPA and FlashAttention, with the baseline's language model.
from dj2mgm.runs.experiments import REFERENCE


include: "inputs/attention_benchmark.smk"


rule benchmark_attention:
    input:
        reference_model_files,
        config=f"results/{RESULTS_PREFIX}attention_benchmark/config.yaml",
        templates=list_templates(
            "attention.html.j2", "report_style.css.j2", "report_charts.html.j2"
        ),
        code=list_script_files("benchmark_attention.py"),
    output:
        page=report(
            f"results/{RESULTS_PREFIX}attention_benchmark/attention.html",
            caption="../report/attention.rst",
            category="Attention",
            labels={"page": "attention"},
        ),
        table=f"results/{RESULTS_PREFIX}attention_benchmark/attention.csv",
    log:
        f"results/{RESULTS_PREFIX}attention_benchmark/benchmark_attention.log",
    benchmark:
        f"results/{RESULTS_PREFIX}attention_benchmark/benchmark_attention.benchmark.tsv"
    conda:
        "../envs/train.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        gpu=1,
        mem_mb=mem_with_retries(MODEL_STAGE_MB),
        runtime=60,
    params:
        content=hash_user_files(reference_model_files),
        model=lambda w: RUNS.first_seed(REFERENCE).config.model.folder,
        folder=subpath(output.table, parent=True),
    shell:
        build_stage_command(
            "benchmark_attention.py",
            "--config {input.config:q} --model={params.model:q}"
            " --output-dir {params.folder:q}",
        )


rule attention_benchmark:
    input:
        f"results/{RESULTS_PREFIX}attention_benchmark/attention.html",
    localrule: True
