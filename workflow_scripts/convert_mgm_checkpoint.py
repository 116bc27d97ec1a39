r"""Convert weights from and to the published MGM code, and other formats to safetensors.

    python workflow_scripts/convert_mgm_checkpoint.py from-mgm model_zoo/MGM-2B model_zoo/mgm-2b \
        --config config/models/mgm-2b.yaml
    python workflow_scripts/convert_mgm_checkpoint.py to-mgm results/models/mgm-2b/mgm exported/MGM-2B
    python workflow_scripts/convert_mgm_checkpoint.py projector-from-mgm mm_projector.bin results/theirs/pretrain
    python workflow_scripts/convert_mgm_checkpoint.py projector-to-mgm results/shapes/tiny/baseline/pretrain
    mm_projector.bin python workflow_scripts/convert_mgm_checkpoint.py convnext downloads/convnext
    model_zoo/convnext-large-d-320 python workflow_scripts/convert_mgm_checkpoint.py safetensors downloads/a-model
    model_zoo/a-model

Weights are read and written shard by shard, and every tensor must be known. docs/models.md lists the folders' sources.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():
    from dj2mgm.errors import InputError
    from dj2mgm.features.fetch.conversion import (
        convert_from_mgm,
        convert_openclip_convnext,
        convert_projector_from_mgm,
        convert_projector_to_mgm,
        convert_to_mgm,
        convert_to_safetensors,
    )
    from dj2mgm.settings.models import MgmParts
    from dj2mgm.storage.files import read_yaml

MODEL_PARTS = tuple(MgmParts.model_fields)
CONVERSIONS = {
    "to-mgm": convert_to_mgm,
    "projector-from-mgm": convert_projector_from_mgm,
    "projector-to-mgm": convert_projector_to_mgm,
    "convnext": convert_openclip_convnext,
    "safetensors": convert_to_safetensors,
}


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="conversion", required=True, metavar="conversion")
    for name in ("from-mgm", *CONVERSIONS):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("output", type=Path)
        if name == "from-mgm":
            command.add_argument("--config", type=Path, required=True, help="the model's file in config/models")
    args = parser.parse_args()
    if args.output.exists():
        raise InputError(f"{args.output} already exists; name a new one, or delete it first")
    if args.conversion == "from-mgm":
        model = read_yaml(args.config)
        if missing := [key for key in MODEL_PARTS if key not in model]:
            raise InputError(
                f"{args.config}: {missing[0]} is missing; name a file with all parts, such as config/models/mgm-2b.yaml"
            )
        tensor_count = convert_from_mgm(args.source, args.output, {key: model[key] for key in MODEL_PARTS})
    else:
        tensor_count = CONVERSIONS[args.conversion](args.source, args.output)
    print(f"converted {tensor_count} tensors from {args.source} to {args.output}")


if __name__ == "__main__":
    main()
