# Checks whether this machine can run the workflow, in the environment that trains. It prints, and runs at every request.
import json


rule doctor:
    log:
        "results/doctor/doctor.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        config=lambda w: json.dumps(config),  # a function, so that braces in it are not read as wildcards
    shell:
        f"python {script_path('doctor.py')} --config {{params.config:q}} 2> {{log:q}}"
