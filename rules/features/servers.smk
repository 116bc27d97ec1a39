# Ask a server the held-out questions: `snakemake serve_check --config endpoint=http://localhost:8000/v1`.
rule serve_check:
    log:
        "results/serve_check/serve_check.log",
    localrule: True
    conda:
        "../../envs/evaluate.yaml"
    params:
        config=config_as_json,
    shell:
        f"python {quote_script_path('check_served_model.py')} --config {{params.config:q}} {PRINT_AND_LOG}"
