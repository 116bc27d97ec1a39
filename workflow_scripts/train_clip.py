"""Trains the tiny CLIP and the tiny high-resolution encoder of the embedded default.

    python workflow_scripts/train_clip.py --config results/foundation/tiny/clip.yaml \\
        --output-dir results/foundation/tiny

Writes clip/ and convnext/, ordinary `from_pretrained` folders.
"""

import argparse
from pathlib import Path

from compute import set_seed, use_cpu_threads
from errors import command_line
from files import read_yaml
from foundation.clip import ClipSpec, train_clip


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    spec = ClipSpec(**read_yaml(args.config))
    use_cpu_threads(None)
    set_seed(spec.seed)
    record = train_clip(spec, args.output_dir / "clip", args.output_dir / "convnext")
    print(record, flush=True)


if __name__ == "__main__":
    main()
