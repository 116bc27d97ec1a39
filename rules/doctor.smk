# Whether this machine can run the workflow, asked in the environment that trains. Prints, and runs whenever it is asked.
rule doctor:
    log:
        "results/doctor/doctor.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        config=lambda w: json.dumps(config),  # by a function: braces in it are no wildcards
    shell:
        f"python {script_path('doctor.py')} --config {{params.config:q}} 2> {{log:q}}"
