"""Patches of Snakemake (tested with Snakemake 9.27.1).

Nothing changes on import. rules/graph.smk and rules/lifecycle.smk apply the patches.

- `replace_graph_builder` replaces `snakemake.workflow.Workflow._build_dag`. Snakemake has no hook between
  the graph and the first job that dry runs call, too; they do not call `onstart`. An issue requests one
  (https://github.com/snakemake/snakemake/issues/3967).
- `record_input_errors` replaces `snakemake.rules.Rule.apply_input_function`. If an input function fails, Snakemake
  drops the job, silently if a file further on exists, also with `--strict-dag-evaluation`. No upstream issue was found.
- `lift_default_job_limit` removes the limit of jobs per second of `snakemake.scheduling.job_scheduler.JobScheduler`,
  whose checks keep a core busy. No upstream issue was found.

training/library_patches names the modules with patches of other libraries.
"""

from collections.abc import Callable
from functools import partial, wraps

from snakemake.exceptions import WorkflowError
from snakemake.rules import Rule


def replace_graph_builder(workflow, build: Callable[[Callable[[], None]], None]) -> None:
    """Make Snakemake call `build(original_builder)` to build its graph of jobs."""
    workflow._build_dag = partial(build, workflow._build_dag)


def record_input_errors() -> list[Exception]:
    """Return a list to which every later failure of an input function is added, without Snakemake's wrapper."""
    errors: list[Exception] = []
    apply = Rule.apply_input_function

    @wraps(apply)
    def apply_and_record(*args, **options):
        try:
            return apply(*args, **options)
        except WorkflowError as error:  # its context is read here, because Snakemake raises it again elsewhere
            errors.append(error.__context__ if isinstance(error.__context__, WorkflowError) else error)
            raise

    Rule.apply_input_function = apply_and_record
    return errors


def lift_default_job_limit(scheduler) -> None:
    """Lift Snakemake's default limit of 100 jobs per second.

    With this limit, Snakemake 9 examines all ready jobs again each second, once for every job that has ended
    (`JobScheduler._schedule_reevalutation`). After some hundred jobs this takes a whole core.
    """
    limit = scheduler.job_rate_limiter
    if limit and (limit.max_jobs, limit.timespan) == (100, 1):
        scheduler.job_rate_limiter = None
