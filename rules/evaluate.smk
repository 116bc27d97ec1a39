# Let the model caption held-out images and answer questions about them, and score this with controls.
import os


def pretrained_flags(wildcards):
    """Params function: the flag for stage 1's folder, if there is one."""
    projector = projector_file(wildcards)
    return [f"--pretrained={os.path.dirname(projector)}"] if projector else []


rule generate_answers:
    input:
        model_files,
        finetuned_files,
        config="results/{run}/generate/config.yaml",
        evaluation=dataset_file("evaluation.jsonl"),
        pretrained=projector_file,
        finetuned=stage_output("finetune", "metrics.json"),
        code=list_script_files("generate_answers.py"),
    output:
        captions="results/{run}/generate/captions.jsonl",
        answers="results/{run}/generate/answers.jsonl",
        likelihoods="results/{run}/generate/likelihoods.jsonl",
    log:
        "results/{run}/generate/generate_answers.log",
    benchmark:
        "results/{run}/generate/generate_answers.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **stage_resources(MODEL_STAGE_MB, minutes=240),
        gpu=single_node_gpus,
    params:
        content=hash_user_files(model_files),
        model=model_folder,
        pretrained=pretrained_flags,
        finetuned=subpath(input.finetuned, parent=True),
    shell:
        build_stage_command(
            "generate_answers.py --config {input.config:q} --model={params.model:q}"
            " --evaluation {input.evaluation:q} {params.pretrained:q}"
            " --finetuned {params.finetuned:q} --output-dir results/{wildcards.run:q}/generate"
        )


rule evaluate_clip:
    input:
        clip_files("evaluate_clip"),
        model_files,
        config="results/{run}/evaluate_clip/config.yaml",
        captions=stage_output("generate", "captions.jsonl"),
        evaluation=dataset_file("evaluation.jsonl"),
        code=list_script_files("evaluate_clip.py"),
    output:
        metrics="results/{run}/evaluate_clip/metrics.json",
        scores="results/{run}/evaluate_clip/scores.jsonl",
    log:
        "results/{run}/evaluate_clip/evaluate_clip.log",
    benchmark:
        "results/{run}/evaluate_clip/evaluate_clip.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    threads: GPU_STAGE_THREADS
    resources:
        **stage_resources(WEIGHTS_STAGE_MB, minutes=120),
        gpu=1,
    params:
        content=hash_user_files(clip_files("evaluate_clip"), model_files),
        model=model_folder,
    shell:
        build_stage_command(
            "evaluate_clip.py --config {input.config:q} --model={params.model:q}"
            " --captions {input.captions:q} --evaluation {input.evaluation:q}"
            " --output-dir results/{wildcards.run:q}/evaluate_clip"
        )


rule evaluate_vqa:
    input:
        answers=stage_output("generate", "answers.jsonl"),
        likelihoods=stage_output("generate", "likelihoods.jsonl"),
        leaks=leaks_file,
        code=list_script_files("evaluate_vqa.py"),
    output:
        metrics="results/{run}/evaluate_vqa/metrics.json",
        scores="results/{run}/evaluate_vqa/scores.jsonl",
    log:
        "results/{run}/evaluate_vqa/evaluate_vqa.log",
    benchmark:
        "results/{run}/evaluate_vqa/evaluate_vqa.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    resources:
        **stage_resources(SMALL_STAGE_MB, minutes=30),
    params:
        leaks=optional_flags("leaks", "--leaks"),
    shell:
        build_stage_command(
            "evaluate_vqa.py --answers {input.answers:q} --likelihoods {input.likelihoods:q}"
            " {params.leaks:q} --output-dir results/{wildcards.run:q}/evaluate_vqa"
        )
