r"""Write DeepSpeed configurations for 1, 2, 4, 6 and 8 GPUs, and for each ZeRO stage, sized for one model.

    python workflow_scripts/write_deepspeed_configs.py --model=results/foundation/tiny/language_model \
        --output-dir results/deepspeed_configs

`--model` is the folder or hub id of the language model, or of a whole model. transformers fills in the remaining "auto"
values (learning rate, precision, clipping) from its training arguments.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.features.presets.gpu_counts import (
        BY_GPU_COUNT,
        WITHOUT_BATCH,
        build_config_for_gpus,
        name_config_for_gpus,
    )
    from dj2mgm.planning.architecture import load_architecture
    from dj2mgm.settings.training_stages import read_deepspeed
    from dj2mgm.storage.files import write_json
    from dj2mgm.training.deepspeed_config import complete_deepspeed_config


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--model", "--output-dir")
    hidden_size = load_architecture(args.model.name, args.model, text=True).hidden_size
    for gpus in BY_GPU_COUNT:
        write_json(args.output_dir / f"{name_config_for_gpus(gpus)}.json", build_config_for_gpus(gpus, hidden_size))
    for name in WITHOUT_BATCH:
        config = complete_deepspeed_config(read_deepspeed(name, "config"), hidden_size)
        write_json(args.output_dir / f"{name}.json", config)


if __name__ == "__main__":
    main()
