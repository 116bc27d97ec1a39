# The runs: the merged configuration of every experiment.
import sys
from pathlib import Path

SCRIPTS = Path(workflow.current_basedir).parent / "workflow_scripts"
sys.path.insert(0, str(SCRIPTS))

from dj2mgm.cli.console import UserError, raising_user_errors
from dj2mgm.errors import InputError

# Modules of features declare keys, and check what they declare.
with raising_user_errors():
    from dj2mgm.runs.layers import EMBEDDED_DEFAULTS, drop_defaults, restore_texts
    from dj2mgm.runs.all_runs import Runs
    from dj2mgm.runs.experiments import find_variant_sources
    from dj2mgm.settings.config_files import check_stated_once


# Read from the command line, because Snakemake knows its targets only after it has read all rules. graph.smk refuses
# `fetch` together with another target.
FETCH_REQUESTED = "fetch" in sys.argv[1:]


if sum(argument.split("=")[0] in ("--config", "-C") for argument in sys.argv[1:]) > 1:
    raise UserError(
        "--config is given several times, of which Snakemake reads only the last; give all settings after one --config"
    )


def select_explicit_settings(config):
    """Return the settings that differ from the defaults.

    `fetch` gets the embedded dataset and model, because its own are not on this machine yet.

    Another workflow that uses this one as a module may pass its whole config.yaml. Defaults that it repeats are left
    out, because they would replace the settings of experiments.
    """
    if FETCH_REQUESTED:
        return EMBEDDED_DEFAULTS
    if workflow.modifier.parent_modifier is None:
        return config
    paths = workflow.modifier.path_modifier
    if paths.prefix or paths.modifies_prefixes:
        raise InputError(
            "module: dj2mgm takes no `prefix` of paths, since its scripts know their folders; remove `prefix`. Results "
            "are in results/<dataset>/<model>/"
        )
    return drop_defaults(config, workflow.config_settings.overwrite_config)


# The Snakefile has no `configfile:`, so that `config` holds only settings of the command line or of a module's user.
with raising_user_errors():
    check_stated_once(workflow.config_settings.config_args or [])
    if workflow.modifier.parent_modifier is None:
        config = restore_texts(
            config,
            workflow.config_settings.config_args or [],
            workflow.config_settings.configfiles,
        )
    RUNS = Runs(select_explicit_settings(config), find_variant_sources())
EXPERIMENTS = RUNS.experiments.names
# folder of pages and studies, below results/: dataset and model
RESULTS_PREFIX = RUNS.results_prefix
MODELS = RUNS.models
