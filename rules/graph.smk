# Check the jobs of a command before the first one starts. Included last, because it needs all rules.
import atexit
import os
import sys

from snakemake.exceptions import MissingRuleException, WorkflowError

from dj2mgm.cli.console import (
    UserError,
    raising_user_errors,
    record_input_errors,
    replace_graph_builder,
)
from dj2mgm.runs.command_messages import (
    PlannedJob,
    check_jobs,
    check_used_keys,
    describe_unknown_target,
    list_missing_models,
    list_results,
    summarize_jobs,
)
from dj2mgm.runs.experiments import REFERENCE


def build_planned_job(job):
    """Return what `check_jobs` needs to know about a job of Snakemake."""
    wildcards = job.wildcards_dict or {}
    return PlannedJob(
        tuple(map(str, job.output or job.input)),
        job.rule.name,
        job.rule.benchmark is not None,
        wildcards.get("run"),
        wildcards.get("dataset"),
        wildcards.get("model"),
    )


def show_at_exit(text):
    """Print a text after everything that Snakemake prints."""
    if text:
        atexit.register(print, text, file=sys.stderr)


def check_requested_targets(targets):
    """Fail if targets or keys of the command line do not belong together, or if a target is a rule with wildcards."""
    if FETCH_REQUESTED and set(targets) != {"fetch"}:
        raise UserError(
            "fetch: no other target runs with it; run it alone, then the others"
        )
    if not targets:
        print(
            f"note: no target is named, so this runs `{REFERENCE}`; `snakemake help` lists others",
            file=sys.stderr,
        )
    check_used_keys(targets or {REFERENCE}, workflow.config_settings.config_args or ())
    for name in targets:
        if workflow.is_rule(name) and workflow.get_rule(name).has_wildcards():
            raise UserError(
                f"{name}: this rule serves every experiment; `snakemake baseline --until {name}` runs one's"
            )


def build_and_check_graph(build_graph):
    """Build the graph as Snakemake does, explain mistakes of the user, and refuse jobs that must not run."""
    input_errors = record_input_errors()
    try:
        with raising_user_errors():
            check_requested_targets(workflow.dag_settings.targets)
            build_graph()
    except MissingRuleException as error:
        names = sorted(workflow.dag_settings.targets)
        for name in [name for name in names if name in str(error)] or names:
            if not workflow.is_rule(name) and not os.path.exists(name):
                targets = [
                    each.name for each in workflow.rules if not each.has_wildcards()
                ]
                raise UserError(describe_unknown_target(RUNS, name, targets)) from None
        raise
    except WorkflowError:
        if not input_errors:
            raise
    if input_errors:
        # Snakemake would use old results of a stage whose input function fails.
        raise input_errors[0] from None
    FINGERPRINTS.save()
    graph = workflow.dag
    # The search starts at the targets, because with --until the graph also holds jobs after them, which do not run.
    needed = filter(graph.needrun, graph.bfs(graph.dependencies, *graph.targetjobs))
    jobs = list(map(build_planned_job, needed))
    targets = list(map(build_planned_job, graph.targetjobs))
    with raising_user_errors():
        check_jobs(RUNS, jobs, targets, READING_TARGETS)
        for check in TARGET_CHECKS:
            check(RUNS, targets)
        missing_models = [*MISSING_MODELS, *list_missing_models(RUNS, jobs)]
        if missing_models and not workflow.dryrun:
            raise missing_models[0]
        if workflow.dryrun:
            missing = sorted(set(map(str, missing_models)))
            arguments = workflow.config_settings.config_args or ()
            lines = summarize_jobs(RUNS, jobs, targets, missing, arguments)
            show_at_exit("\n".join(lines))
        elif not jobs:
            show_at_exit("\n".join(list_results(targets)))


if workflow.is_main_process:
    replace_graph_builder(workflow, build_and_check_graph)
