"""Print the rules of the workflow in the current folder, and a run's shell commands and settings files, as JSON.

python shell_commands.py CONFIG TARGET...

CONFIG contains the values of `--config` as JSON.
"""

import json
import sys
from pathlib import Path

from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, Quietness, ResourceSettings


def main(config: dict, targets: list[str]) -> None:
    sys.argv = ["snakemake", "--dry-run", *targets]  # the Snakefile reads the command line
    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
        workflow = api.workflow(
            resource_settings=ResourceSettings(cores=1),
            config_settings=ConfigSettings(config=config),
            snakefile=Path("Snakefile"),
        )
        workflow.dag(DAGSettings(targets=set(targets))).execute_workflow(executor="dryrun")
        inner = workflow._workflow  # Snakemake's interface does not return jobs
        jobs = [[job.rule.name, job.shellcmd] for job in inner.dag.jobs if job.shellcmd]
        rules = [rule.name for rule in inner.rules if rule.shellcmd]
        settings = [job.params.yaml for job in inner.dag.jobs if job.is_template_engine]
    print("\n" + json.dumps({"rules": rules, "jobs": jobs, "settings": settings}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
