# Input functions of rules/crate.smk.
from dj2mgm.cli.console import UserError


def crate_to_reproduce(wildcards):
    """Params function: the crate that the command line names."""
    if RUNS.shared.crate is None:
        raise UserError(
            "crate is not set: `snakemake reproduce --config crate=path/to/run.crate.zip`"
        )
    return RUNS.shared.crate
