# Steps at the start and end of a command of Snakemake: environment of its jobs, messages, console, lock.
import os
import sys
from pathlib import Path

from dj2mgm.cli import console
from dj2mgm.cli.command_line import SWITCHES
from dj2mgm.cli.console import lift_default_job_limit, raising_user_errors
from dj2mgm.cli.run_lock import (
    check_scheduler,
    end_run,
    is_locked_here,
    restart_snakemake,
    start_run,
)
from dj2mgm.runs.command_messages import list_start_messages
from dj2mgm.torch_environment import (
    limit_compiled_code,
    set_torch_environment,
    share_compiled_code,
)
from dj2mgm.training.checkpoints import discard_finished

# Set in this process, because stages inherit its variables.
set_torch_environment()
with raising_user_errors():
    share_compiled_code()
# Stages import modules from the folder of their script.
os.environ.pop("PYTHONSAFEPATH", None)
for switch, value in SWITCHES.items():
    os.environ.setdefault(switch, value)

if workflow.is_main_process:
    for message in list_start_messages(RUNS, sys.argv[1:]):
        print(message, file=sys.stderr)


# Rules that write nothing but their log. Features add theirs. A command that runs no other needs no lock. A command that
# names only these runs beside a run that does not use the files that it makes.
UNLOCKED_RULES = {"doctor", "help", "plan"}


def is_stage(rule):
    """Return whether a rule's jobs are measured, and shown in the console."""
    return workflow.is_rule(rule) and workflow.get_rule(rule).benchmark is not None


# Without a console, stages print everything. So do jobs on a cluster, whose scheduler keeps it for each attempt.
if workflow.remote_exec or (
    workflow.is_main_process and not console.attach(workflow.output_settings, is_stage)
):
    os.environ.update(STAGE_OUTPUT="2")


onstart:
    lift_default_job_limit(workflow.scheduler)
    jobs = list(workflow.dag.needrun_jobs())
    if {job.rule.name for job in jobs} - UNLOCKED_RULES:
        with raising_user_errors():
            check_scheduler(workflow.executor_plugin.name)
            taken_over = start_run(
                on_cluster=workflow.non_local_exec,
                made_files={str(file) for job in jobs for file in job.output},
                used_files={
                    str(file)
                    for job in workflow.dag.jobs
                    for file in (*job.input, *job.output)
                },
                is_short={job.rule.name for job in workflow.dag.targetjobs}
                <= UNLOCKED_RULES,
            )
        if taken_over:
            restart_snakemake(on_cluster=workflow.non_local_exec)
        limit_compiled_code()


onsuccess:
    end_run(on_cluster=workflow.non_local_exec)
    if is_locked_here():
        discard_finished(
            Path(RUNS.find_stage_folder(run, stage))
            for run in RUNS.iterate_with_results()
            for stage in run.training_stages
        )
        RUNS.reuse.write_notes(RUNS.iterate_with_results())


onerror:
    end_run(on_cluster=workflow.non_local_exec)
    if is_locked_here():
        RUNS.reuse.write_notes(RUNS.iterate_with_results())
