# Single commands, which run at every request.


include: "inputs/tools.smk"


# Checks whether this machine can run the workflow, in the environment that trains, and prints the result.
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


# Downloads a model and a dataset from the Hugging Face hub: `snakemake fetch --config model=… dataset=…`. Nothing else
# of the workflow contacts the hub. Only missing files are downloaded.
rule fetch:
    log:
        "results/fetch/fetch.log",
    localrule: True
    conda:
        "../envs/evaluate.yaml"
    params:
        config=config_as_json,
    shell:
        f"python {quote_script_path('fetch.py')} --config {{params.config:q}} 2>&1 | tee {{log:q}}"


# Asks a server the held-out questions: `snakemake serve_check --config endpoint=http://localhost:8000/v1`.
rule serve_check:
    log:
        "results/serve_check/serve_check.log",
    localrule: True
    conda:
        "../envs/evaluate.yaml"
    params:
        config=config_as_json,
    shell:
        f"python {quote_script_path('check_served_model.py')} --config {{params.config:q}} 2>&1 | tee {{log:q}}"


# Lists all finished experiments of this project.
rule leaderboard:
    log:
        "results/leaderboard/leaderboard.log",
    localrule: True
    conda:
        "../envs/report.yaml"
    shell:
        f"python {quote_script_path('write_leaderboard.py')} --results results"
        " --output results/leaderboard/leaderboard.html 2>&1 | tee {log:q}"
