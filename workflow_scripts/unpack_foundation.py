"""Unpack the trained tiny models of the repository from bfloat16 to float32.

    python workflow_scripts/unpack_foundation.py --input-dir config/foundation/tiny --output-dir results/foundation/tiny

Writes clip/, convnext/ and language_model/, ordinary `from_pretrained` folders. `benchmarks/foundation.py` trains these
models and compares them with a new training.
"""

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.foundation.copying import copy_parts


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--input-dir", "--output-dir")
    copy_parts(args.input_dir, args.output_dir)


if __name__ == "__main__":
    main()
