# List all finished experiments of this project. It has no output, so it runs at every request.


rule leaderboard:
    log:
        "results/leaderboard/leaderboard.log",
    localrule: True
    conda:
        "../../envs/report.yaml"
    shell:
        f"python {quote_script_path('write_leaderboard.py')} --results results"
        f" --output results/leaderboard/leaderboard.html {PRINT_AND_LOG}"
