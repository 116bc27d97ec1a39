# Which runs there are: the merged configuration of every experiment; and what happens before and after Snakemake's work.
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from snakemake.exceptions import WorkflowError

SCRIPTS = Path(workflow.current_basedir).parent / "workflow_scripts"
sys.path.insert(0, str(SCRIPTS))

from dj2mgm import console
from dj2mgm.console import UserError
from dj2mgm.command_line import escape_control
from dj2mgm.config.benchmarks import declarations
from dj2mgm.config.layers import without_defaults
from dj2mgm.config.reading import check_stated_once
from dj2mgm.config.runs import REFERENCE, Runs, reserved_names
from dj2mgm.errors import InputError
from dj2mgm.library_messages import SWITCHES
from dj2mgm.takeover import end_run, restart_snakemake, start_run
from dj2mgm.training.checkpoints import discard_finished


@contextmanager
def user_errors():
    """Wraps code that may raise InputError: Snakemake prints its sentence."""
    try:
        yield
    except InputError as error:
        raise UserError(escape_control(str(error))) from None


def given_settings(config):
    """What is set besides the defaults. As a module, `config` may be the whole of another workflow's config.yaml: what
    it repeats of the defaults would win over experiments."""
    if workflow.modifier.parent_modifier is None:
        return config
    paths = workflow.modifier.path_modifier
    if paths.prefix or paths.modifies_prefixes:
        raise InputError(
            "module: dj2mgm takes no `prefix` of paths, since its scripts know their folders; set `results` in the "
            "module's config, which puts results into a folder of their own"
        )
    return without_defaults(config, workflow.config_settings.overwrite_config)


# no `configfile:` directive: `config` is then exactly the command line's layer
with user_errors():
    check_stated_once(workflow.config_settings.config_args or [])
    RUNS = Runs(given_settings(config))
EXPERIMENTS = RUNS.names
PLACE = RUNS.place  # of runs and pages, below results/
MODELS = RUNS.models
if workflow.is_main_process:
    if RUNS.trusts_recipes:
        print(
            "warning: trusted_recipes is true: recipes may run code, ask servers, and write or delete files; run only "
            "recipes that you have read",
            file=sys.stderr,
        )
    for name in RUNS.files & RUNS.refused.keys():
        print(f"warning: {escape_control(str(RUNS.refused[name]))}", file=sys.stderr)


def is_stage(rule):
    """Whether a rule's jobs take long enough to be measured, and shown in the console."""
    return workflow.is_rule(rule) and workflow.get_rule(rule).benchmark is not None


# what Snakemake prints from here on
for switch, value in SWITCHES.items():
    os.environ.setdefault(switch, value)
# a job on a cluster prints everything: its scheduler keeps that for each attempt
if workflow.remote_exec or (
    workflow.is_main_process and not console.attach(workflow.output_settings, is_stage)
):
    os.environ.update(STAGE_OUTPUT="2")


onstart:
    with user_errors():
        taken_over = start_run(on_cluster=workflow.non_local_exec)
    if taken_over:
        restart_snakemake(on_cluster=workflow.non_local_exec)


onsuccess:
    end_run(on_cluster=workflow.non_local_exec)
    discard_finished(
        Path(RUNS.stage(run, stage)) for run in RUNS for stage in run.trains
    )
    RUNS.note_shared_stages()


onerror:
    end_run(on_cluster=workflow.non_local_exec)
    RUNS.note_shared_stages()


def any_of(names):
    """A regular expression: one of these names, and nothing else."""
    return f"({'|'.join(map(re.escape, names)) or '(?!)'})"


def runs_of(experiments):
    """A regular expression: the folders of these experiments' runs."""
    return f"{re.escape(PLACE)}{any_of(experiments)}(/seed-[0-9]+)?"


wildcard_constraints:
    run=runs_of(RUNS.configs),
    page=f"{re.escape(PLACE)}(report|{any_of(EXPERIMENTS)}/report)",
    dataset="[^/]+",
    model="[^/]+",
    stage=any_of(RUNS.stages),
    benchmark=any_of(declarations()),
    task=any_of(RUNS.tasks),
    part="clip|language_model",
    variants=any_of(RUNS.experiments_by_page),
