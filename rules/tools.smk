# Run single commands. They have no outputs, so they run at every request.


# Check whether this machine can run the workflow, in the environment that trains, and print the result.
rule doctor:
    log:
        "results/doctor/doctor.log",
    localrule: True
    conda:
        "../envs/train.yaml"
    params:
        config=config_as_json,
    shell:
        f"python {quote_script_path('doctor.py')} --config {{params.config:q}} 2> {{log:q}}"


# List the targets for people; `snakemake --list` has all rules.
rule help:
    log:
        "results/help/help.log",
    localrule: True
    conda:
        "../envs/evaluate.yaml"
    shell:
        f"cat {quote_script_path('help.txt')} 2> {{log:q}}"
