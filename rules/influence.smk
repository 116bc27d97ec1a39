# Find the training rows behind wrong answers: `snakemake influence --config experiment=dj_synth`.
from dj2mgm.runs.experiments import REFERENCE


rule trace_influence:
    input:
        model_files,
        finetuned_files,
        config="results/{run}/influence/config.yaml",
        generate_config=stage_output("generate", "config.yaml"),
        answers=stage_output("generate", "answers.jsonl"),
        evaluation=dataset_file("evaluation.jsonl"),
        data=stage_output("jsonl", "finetune.jsonl"),
        statistics=instruction_output("stats.jsonl"),
        finetuned=stage_output("finetune", "metrics.json"),
        templates=list_templates("influence.html.j2"),
        code=list_script_files("trace_influence.py"),
    output:
        rows="results/{run}/influence/influence.jsonl",
        page="results/{run}/influence/influence.html",
    log:
        "results/{run}/influence/trace_influence.log",
    benchmark:
        "results/{run}/influence/trace_influence.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        gpu=1,
        mem_mb=mem_with_retries(MODEL_STAGE_MB),
        runtime=240,
    params:
        content=hash_user_files(model_files),
        model=model_folder,
        finetuned=subpath(input.finetuned, parent=True),
        statistics=optional_flag("--statistics", "statistics"),
    shell:
        build_stage_command(
            "trace_influence.py",
            "--config {input.config:q} --model={params.model:q} --finetuned {params.finetuned:q}"
            " --data {input.data:q} --answers {input.answers:q} --generate-config {input.generate_config:q}"
            " --evaluation {input.evaluation:q} --output-dir results/{wildcards.run:q}/influence {params.statistics:q}",
        )


rule influence:
    input:
        requested_files(
            "influence",
            REFERENCE,
            lambda run: f"results/{run.folder}/influence/influence.html",
        ),
    localrule: True
