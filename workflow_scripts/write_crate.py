r"""Write a page's origin as a Workflow Run RO-Crate: code, configuration, inputs, jobs, results.

    python workflow_scripts/write_crate.py --config results/shapes/tiny/report/crate/config.yaml \
        --output results/shapes/tiny/report/crate/run.crate.zip

The crate contains weights, images and large files only as digests.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import pluralize
from dj2mgm.features.crate.crate_record import CrateSettings
from dj2mgm.features.crate.crate_writer import write_crate
from dj2mgm.settings.validation import load_settings


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output")
    count = write_crate(load_settings(CrateSettings, paths.config), paths.output)
    print(f"wrote {paths.output}: {pluralize(count, 'job')}, {paths.output.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
