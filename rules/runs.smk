# The runs: the merged configuration of every experiment. Also steps before and after Snakemake's jobs.
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

SCRIPTS = Path(workflow.current_basedir).parent / "workflow_scripts"
sys.path.insert(0, str(SCRIPTS))

from dj2mgm.cli import console
from dj2mgm.cli.console import UserError
from dj2mgm.cli.command_line import escape_control
from dj2mgm.settings.benchmarks import read_declarations
from dj2mgm.runs.layers import EMBEDDED_DEFAULTS, drop_defaults
from dj2mgm.settings.config_files import check_stated_once
from dj2mgm.runs.run import Runs
from dj2mgm.runs.start_messages import list_start_messages
from dj2mgm.records.search_records import RANDOM_SUFFIX
from dj2mgm.errors import InputError
from dj2mgm.cli.library_messages import SWITCHES
from dj2mgm.cli.snakemake_patches import lift_default_job_limit
from dj2mgm.cli.run_lock import end_run, restart_snakemake, start_run
from dj2mgm.torch_environment import (
    limit_compiled_code,
    set_torch_environment,
    share_compiled_code,
)
from dj2mgm.training.checkpoints import discard_finished

# stages inherit these variables
set_torch_environment()


@contextmanager
def user_errors():
    """Run code that may raise InputError, and let Snakemake print its message."""
    try:
        yield
    except InputError as error:
        raise UserError(escape_control(str(error))) from None


# A Snakefile cannot ask Snakemake for the targets. graph.smk refuses `fetch` together with another target.
FETCHES = "fetch" in sys.argv[1:]


if sum(argument.split("=")[0] in ("--config", "-C") for argument in sys.argv[1:]) > 1:
    raise UserError(
        "--config is given several times, of which Snakemake reads only the last; give all settings after one --config"
    )


def explicit_settings(config):
    """Return the settings that differ from the defaults.

    `fetch` reads its dataset and model itself, because they are not on this machine yet.
    As a module, `config` may be the whole config.yaml of another workflow. If it repeats defaults, these would replace
    the settings of experiments.
    """
    if FETCHES:
        return EMBEDDED_DEFAULTS
    if workflow.modifier.parent_modifier is None:
        return config
    paths = workflow.modifier.path_modifier
    if paths.prefix or paths.modifies_prefixes:
        raise InputError(
            "module: dj2mgm takes no `prefix` of paths, since its scripts know their folders; set `results` in the "
            "module's config, which puts results into a folder of their own"
        )
    return drop_defaults(config, workflow.config_settings.overwrite_config)


# no `configfile:` directive: `config` is then exactly the command line's layer
with user_errors():
    share_compiled_code()
    check_stated_once(workflow.config_settings.config_args or [])
    RUNS = Runs(explicit_settings(config))
EXPERIMENTS = RUNS.experiments.names
RESULTS_PREFIX = RUNS.results_prefix  # of runs and pages, below results/
MODELS = RUNS.models
if workflow.is_main_process:
    for message in list_start_messages(RUNS):
        print(message, file=sys.stderr)


def is_stage(rule):
    """Return whether a rule's jobs are measured, and shown in the console."""
    return workflow.is_rule(rule) and workflow.get_rule(rule).benchmark is not None


# messages of libraries in Snakemake's own process
for switch, value in SWITCHES.items():
    os.environ.setdefault(switch, value)
# a job on a cluster prints everything, which its scheduler keeps for each attempt
if workflow.remote_exec or (
    workflow.is_main_process and not console.attach(workflow.output_settings, is_stage)
):
    os.environ.update(STAGE_OUTPUT="2")


onstart:
    with user_errors():
        taken_over = start_run(on_cluster=workflow.non_local_exec)
    if taken_over:
        restart_snakemake(on_cluster=workflow.non_local_exec)
    limit_compiled_code()
    lift_default_job_limit(workflow.scheduler)


onsuccess:
    end_run(on_cluster=workflow.non_local_exec)
    discard_finished(
        Path(RUNS.stage_folder(run, stage))
        for run in RUNS.with_results()
        for stage in run.training_stages
    )
    RUNS.reuse.write_notes()


onerror:
    end_run(on_cluster=workflow.non_local_exec)
    RUNS.reuse.write_notes()


def match_any(names):
    """Return a regular expression for one of these names."""
    return f"({'|'.join(map(re.escape, names)) or '(?!)'})"


def match_runs(experiments):
    """Return a regular expression for the folders of these experiments' runs, and of trials that change them."""
    searched = {search.experiment for search in RUNS.experiments.searches.values()}
    trials = f"{match_any(searched & {*experiments})}-[0-9a-f]{{10}}(-0\\.[0-9]+|{RANDOM_SUFFIX})?"
    return (
        f"{re.escape(RESULTS_PREFIX)}({match_any(experiments)}|{trials})(/seed-[0-9]+)?"
    )


wildcard_constraints:
    run=match_runs(RUNS.experiments.configs),
    page=f"{re.escape(RESULTS_PREFIX)}(report|{match_any(EXPERIMENTS)}/report)",
    decided=match_any(EXPERIMENTS),
    number="[0-9]+",
    dataset="[^/]+",
    model="[^/]+",
    stage=match_any(RUNS.stages),
    benchmark=match_any(read_declarations()),
    task=match_any(RUNS.shared.evaluations),
    part="clip|language_model",
    study=match_any(RUNS.experiments.studies),
    key="[0-9a-f]+",
