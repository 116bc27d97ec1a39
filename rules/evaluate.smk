# What the model says about held-out images, and how good that is beside its controls.
rule generate_answers:
    input:
        model_file,
        rules.pretrain.output.projector,
        rules.finetune.output.adapter,
        rules.finetune.output.projector,
        config="results/{experiment}/generate/config.yaml",
        evaluation=dataset_file("evaluation.jsonl"),
        code=code("generate_answers.py"),
    output:
        captions="results/{experiment}/generate/captions.jsonl",
        answers="results/{experiment}/generate/answers.jsonl",
    log:
        "results/{experiment}/generate/generate_answers.log",
    benchmark:
        "results/{experiment}/generate/generate_answers.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    threads: 8
    resources:
        gpu=1,
        mem_mb=24000,
        runtime=240,
    params:
        model=model_folder,
    shell:
        "python workflow_scripts/generate_answers.py --config {input.config:q} --model {params.model:q}"
        " --evaluation {input.evaluation:q}"
        " --pretrained results/{wildcards.experiment:q}/pretrain --finetuned results/{wildcards.experiment:q}/finetune"
        " --output-dir results/{wildcards.experiment:q}/generate 2>&1 | tee {log:q}"


rule evaluate_clip:
    input:
        lambda w: foundation_files(CONFIG[w.experiment]["model"]["name"])[:1],
        config="results/{experiment}/evaluate_clip/config.yaml",
        captions=rules.generate_answers.output.captions,
        evaluation=dataset_file("evaluation.jsonl"),
        code=code("evaluate_clip.py"),
    output:
        "results/{experiment}/evaluate_clip/metrics.json",
    log:
        "results/{experiment}/evaluate_clip/evaluate_clip.log",
    benchmark:
        "results/{experiment}/evaluate_clip/evaluate_clip.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    threads: 8
    resources:
        gpu=1,
        mem_mb=16000,
        runtime=120,
    shell:
        "python workflow_scripts/evaluate_clip.py --config {input.config:q} --captions {input.captions:q}"
        " --evaluation {input.evaluation:q} --output {output:q} 2>&1 | tee {log:q}"


rule evaluate_vqa:
    input:
        answers=rules.generate_answers.output.answers,
        code=code("evaluate_vqa.py"),
    output:
        "results/{experiment}/evaluate_vqa/metrics.json",
    log:
        "results/{experiment}/evaluate_vqa/evaluate_vqa.log",
    benchmark:
        "results/{experiment}/evaluate_vqa/evaluate_vqa.benchmark.tsv"
    conda:
        "../envs/evaluate.yaml"
    resources:
        mem_mb=4000,
        runtime=30,
    shell:
        "python workflow_scripts/evaluate_vqa.py --answers {input.answers:q} --output {output:q} 2>&1 | tee {log:q}"
