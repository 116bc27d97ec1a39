# Data to model: `snakemake baseline`. Every experiment in config/experiments/ is a target.
import os
import sys
from glob import glob
from pathlib import Path

from snakemake.utils import min_version

min_version("9.0")


show_other_error = sys.excepthook


def show_error(kind, error, traceback):
    """Show Ctrl-C, which may come while the workflow is read, as one word."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        show_other_error(kind, error, traceback)


sys.excepthook = show_error


report: "report/workflow.rst"


# names and functions that all rules share
include: "rules/runs.smk"
include: "rules/wildcards.smk"
include: "rules/lifecycle.smk"
include: "rules/resources.smk"
include: "rules/commands.smk"
include: "rules/common.smk"
include: "rules/model_inputs.smk"
include: "rules/targets.smk"
# rules of stages and targets
include: "rules/settings.smk"
include: "rules/dataset.smk"
include: "rules/foundation.smk"
include: "rules/filter.smk"
include: "rules/synthesize.smk"
include: "rules/leaks.smk"
include: "rules/jsonl.smk"
include: "rules/plan.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"
include: "rules/tools.smk"


# rules of features
for path in sorted(glob(f"{workflow.current_basedir}/rules/features/*.smk")):

    include: path


# Snakemake renders templates in its own process, which saves a start of Python for each file.
for name, settings_file in SETTINGS_FILES.items():

    rule:
        name:
            name
        input:
            settings_file.needs,
            template=os.path.relpath(SCRIPTS / "dj2mgm/settings/settings.yaml.jinja"),
        output:
            settings_file.path,
        log:
            Path(settings_file.path).with_suffix(".log"),  # stays empty; Snakemake's lint requires one
        params:
            yaml=format_settings(settings_file.build),
        template_engine:
            "jinja2"


# imported here, because rules/runs.smk adds the library to sys.path
from dj2mgm.runs import pages
from dj2mgm.runs.experiments import REFERENCE

for name in EXPERIMENTS:

    rule:
        name:
            name
        default_target: name == REFERENCE
        input:
            target_files(
                name, f"results/{pages.locate_page_folder(RUNS, name)}/report.html"
            ),
        localrule: True


# An experiment with an invalid file is a target, too, so that its mistake is reported only if it is requested.
for name in RUNS.experiments.errors:
    if not workflow.is_rule(name):

        rule:
            name:
                name
            input:
                target_files(name),
            localrule: True


include: "rules/graph.smk"
