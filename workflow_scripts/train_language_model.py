"""Trains the tiny language model of the embedded default: Gemma's architecture, taught to read scenes.

    python workflow_scripts/train_language_model.py --config results/foundation/tiny/language_model.yaml \\
        --output-dir results/foundation/tiny/language_model
"""

import argparse
from pathlib import Path

from compute import set_seed, use_cpu_threads
from errors import command_line
from files import read_yaml, replace_folder
from foundation.language_model import LanguageModelSpec, train_language_model


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    spec = LanguageModelSpec(**read_yaml(args.config))
    use_cpu_threads(None)
    set_seed(spec.seed)
    with replace_folder(args.output_dir) as folder:
        record = train_language_model(spec, folder)
    print(record, flush=True)


if __name__ == "__main__":
    main()
