UNLOCKED_RULES.add("fetch")  # it adds missing files only, which no run in progress uses


# Download a model and a dataset from the Hugging Face hub: `snakemake fetch --config model=… dataset=…`. Only missing
# files are downloaded. No other rule downloads anything.
rule fetch:
    log:
        "results/fetch/fetch.log",
    localrule: True
    conda:
        "../../envs/evaluate.yaml"
    params:
        config=config_as_json,
    shell:
        f"python {quote_script_path('fetch.py')} --config {{params.config:q}} {PRINT_AND_LOG}"
