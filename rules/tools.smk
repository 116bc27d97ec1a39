# Run single commands. They have no outputs, so they run at every request.
import json


def config_as_json(wildcards):
    """Params function: the values of --config; a function, so that braces in them are not read as wildcards."""
    return json.dumps(config)


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


# Download a model and a dataset from the Hugging Face hub: `snakemake fetch --config model=… dataset=…`. Only missing
# files are downloaded. No other rule downloads anything.
rule fetch:
    log:
        "results/fetch/fetch.log",
    localrule: True
    conda:
        "../envs/evaluate.yaml"
    params:
        config=config_as_json,
    shell:
        f"python {quote_script_path('fetch.py')} --config {{params.config:q}} {PRINT_AND_LOG}"


# List all finished experiments of this project.
rule leaderboard:
    log:
        "results/leaderboard/leaderboard.log",
    localrule: True
    conda:
        "../envs/report.yaml"
    shell:
        f"python {quote_script_path('write_leaderboard.py')} --results results"
        f" --output results/leaderboard/leaderboard.html {PRINT_AND_LOG}"
