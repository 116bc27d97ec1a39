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
