"""Unpack the trained tiny models of the repository from bfloat16 to float32.

    python workflow_scripts/unpack_foundation.py --input-dir config/foundation/tiny --output-dir results/foundation/tiny

Writes clip/, convnext/ and language_model/, ordinary `from_pretrained` folders. `benchmarks/foundation.py` trains these
models and compares them with a new training.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    import torch
    from safetensors.torch import load_file, save_file

    from dj2mgm.model_files.missing_models import FOUNDATION_PARTS
    from dj2mgm.model_files.model_folders import (
        CONFIG_FILES,
        PROCESSOR_FILES,
        TOKENIZER_FILES,
        check_model_folder,
        copy_model_files,
    )
    from dj2mgm.storage.files import replace_folder

WEIGHTS_FILE = "model.safetensors"


def copy_parts(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
    for part in FOUNDATION_PARTS:
        copy_part(source / part, target / part, dtype)


def copy_part(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy a `from_pretrained` folder in one step, with its weights as `dtype`."""
    check_model_folder(source)
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / WEIGHTS_FILE).items()
    }
    with replace_folder(target) as folder:
        copy_model_files(source, folder, CONFIG_FILES | PROCESSOR_FILES | TOKENIZER_FILES)
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--input-dir", "--output-dir")
    copy_parts(args.input_dir, args.output_dir)


if __name__ == "__main__":
    main()
