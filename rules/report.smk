# One self-contained page about one experiment.
rule compare_experiments:
    input:
        dataset_file("summary.json"),
        dataset_file("evaluation.jsonl"),
        rules.filter_data.output.summary,
        rules.write_jsonl.output.summary,
        rules.pretrain.output.steps,
        rules.pretrain.output.metrics,
        rules.finetune.output.steps,
        rules.finetune.output.metrics,
        rules.generate_answers.output,
        rules.evaluate_clip.output,
        rules.evaluate_vqa.output,
        template="workflow_scripts/reporting/report.html.j2",
        code=code("compare_experiments.py"),
    output:
        page=report("results/{experiment}/report/report.html", category="Report"),
        table="results/{experiment}/report/comparison.csv",
    log:
        "results/{experiment}/report/compare_experiments.log",
    benchmark:
        "results/{experiment}/report/compare_experiments.benchmark.tsv"
    conda:
        "../envs/report.yaml"
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        dataset=lambda w: f"results/datasets/{DATASET_OF[w.experiment]['name']}",
    shell:
        "python workflow_scripts/compare_experiments.py --experiments results/{wildcards.experiment:q}"
        " --datasets {params.dataset:q} --output-dir results/{wildcards.experiment:q}/report 2>&1 | tee {log:q}"
