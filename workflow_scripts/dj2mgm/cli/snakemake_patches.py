"""Patches of Snakemake (tested with Snakemake 9.27.1).

Nothing changes on import. rules/graph.smk and rules/lifecycle.smk apply the patches.

- `replace_graph_builder` replaces `snakemake.workflow.Workflow._build_dag`. Snakemake has no hook between
  the graph and the first job that dry runs call, too; they do not call `onstart`. An issue requests one
  (https://github.com/snakemake/snakemake/issues/3967).
- `lift_default_job_limit` removes the limit of jobs per second of `snakemake.scheduling.job_scheduler.JobScheduler`,
  whose checks keep a core busy. No upstream issue was found.

training/library_patches names the modules with patches of other libraries.
"""

from collections.abc import Callable
from functools import partial


def replace_graph_builder(workflow, build: Callable[[Callable[[], None]], None]) -> None:
    """Make Snakemake call `build(original_builder)` to build its graph of jobs."""
    workflow._build_dag = partial(build, workflow._build_dag)


def lift_default_job_limit(scheduler) -> None:
    """Lift Snakemake's default limit of 100 jobs per second.

    With this limit, Snakemake 9 examines all ready jobs again each second, once for every job that has ended
    (`JobScheduler._schedule_reevalutation`). After some hundred jobs this takes a whole core.
    """
    limit = scheduler.job_rate_limiter
    if limit and (limit.max_jobs, limit.timespan) == (100, 1):
        scheduler.job_rate_limiter = None
