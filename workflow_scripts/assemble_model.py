"""Puts a language model, a CLIP tower and a ConvNeXt together into one MGM folder for `from_pretrained`.

    python workflow_scripts/assemble_model.py --config results/models/tiny/config.yaml \\
        --output-dir results/models/tiny/mgm

The parts are local folders or hub ids. Projector and mining layers are random until stage 1 has trained them.
"""

import argparse
from pathlib import Path

from compute import set_seed
from errors import command_line
from files import read_yaml, replace_folder
from mgm.assemble import assemble


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    settings = read_yaml(args.config)
    set_seed(0)
    model, processor = assemble(**settings)
    with replace_folder(args.output_dir) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
