# Downloads a model and a dataset from the Hugging Face hub: `snakemake fetch --config model=… dataset=…`. Nothing else
# of the workflow contacts the hub. It runs at every request, and downloads only what is missing.
import json


rule fetch:
    log:
        "results/fetch/fetch.log",
    localrule: True
    conda:
        "../envs/evaluate.yaml"
    params:
        config=lambda w: json.dumps(config),  # a function, so that braces in it are not read as wildcards
    shell:
        f"python {script_path('fetch.py')} --config {{params.config:q}} 2>&1 | tee {{log:q}}"
