# Lists all finished experiments of this project. It reads all results that it finds, and runs at every request.


rule leaderboard:
    log:
        "results/leaderboard/leaderboard.log",
    localrule: True
    conda:
        "../envs/report.yaml"
    shell:
        f"python {script_path('write_leaderboard.py')} --results results"
        " --output results/leaderboard/leaderboard.html 2>&1 | tee {log:q}"
