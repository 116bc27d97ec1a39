"""Print the targets that a new user needs, and the order of a command's words.

python workflow_scripts/print_help.py
"""

from dj2mgm.cli.command_line import command_line, make_parser

TEXT = """\
snakemake <target> [--cores N] [--dry-run] --config key=value key=value …

The target comes first and --config last. A key has no dashes before it, and no
spaces around "=": `snakemake check --config dataset=path/to/my_photos`.
"Config entries have to be defined as name=value pairs" means one of the two.

Before a training
  check        reads your data, and shows what a comparison could find:
               snakemake check --config dataset=path/to/my_photos
  plan         predicts memory, minutes and disk:
               snakemake plan --config model=qwen3-vl-2b gpu=rtx-4090
  fetch        downloads a model or known data:
               snakemake fetch --config model=qwen3-vl-2b
  doctor       checks this machine: snakemake doctor
  explore      shows rows of a finished dataset or run, without Snakemake:
               python workflow_scripts/explore.py results/datasets/my_photos

Training and comparison
  baseline     trains on the data after inexpensive filters
  dj_synth     trains on better captions, and compares with the baseline
  <name>       trains config/experiments/<name>.yaml, and compares
  <study>      compares the variants of config/studies/<study>.yaml
  decide       adds seeds until a verdict is sure: --config experiment=<name>
  leaderboard  shows all finished experiments
  publish      writes model and data with cards: --config experiment=<name>

`snakemake --dry-run <target>` shows what would run. docs/targets.md has more.
"""


@command_line
def main() -> None:
    make_parser(__doc__).parse_args()
    print(TEXT, end="")


if __name__ == "__main__":
    main()
