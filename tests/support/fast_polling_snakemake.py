"""Snakemake that queries job states in Slurm every second; its plugin waits 10 s longer after each answer."""

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

Executor.next_seconds_between_status_checks = property(lambda executor: 1, lambda executor, seconds: None)

if __name__ == "__main__":
    main()
