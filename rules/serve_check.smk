# Asks a server the held-out questions: `snakemake serve_check --config endpoint=http://localhost:8000/v1`. It runs at
# every request, because the server may have changed, and trains nothing.
import json


rule serve_check:
    log:
        "results/serve_check/serve_check.log",
    localrule: True
    conda:
        "../envs/evaluate.yaml"
    params:
        config=lambda w: json.dumps(config),  # a function, so that braces in it are not read as wildcards
    shell:
        f"python {script_path('check_served_model.py')} --config {{params.config:q}} 2>&1 | tee {{log:q}}"
