"""Train a preset (config/presets), a text model, by full fine-tuning under DeepSpeed on any number of GPUs.

    python workflow_scripts/train_deepspeed.py --preset 7b_mamba --num-gpus 6 --dry-run
    python workflow_scripts/train_deepspeed.py --preset 7b_mamba --num-gpus 6

--dry-run checks everything up to the first step: configuration, batch sizes, memory, and data if there is any.
--gpu-memory and --host-memory (GiB) describe another machine than this one. Results go to results/presets/<preset>.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():  # sets variables that torch reads on import
    import torch

    from dj2mgm.errors import InputError
    from dj2mgm.features.presets.gpu_counts import BY_GPU_COUNT, build_config_for_gpus
    from dj2mgm.features.presets.text_dataset import read_texts
    from dj2mgm.planning.architecture import Architecture, load_architecture
    from dj2mgm.planning.prediction import Machine, read_free_memory
    from dj2mgm.planning.step import Workload
    from dj2mgm.runs.layers import merge, read_default_layer
    from dj2mgm.script_modules import SCRIPTS
    from dj2mgm.settings.base import build_schema
    from dj2mgm.settings.config_files import locate_existing_file, read_config
    from dj2mgm.settings.models import PresetFile
    from dj2mgm.settings.training_stages import AUTO, PretrainSection, read_deepspeed_file, solve_batch
    from dj2mgm.settings.validation import Layer, validate_settings
    from dj2mgm.storage.files import write_yaml
    from dj2mgm.training.deepspeed_config import (
        complete_deepspeed_config,
        with_batch,
    )
    from dj2mgm.training.memory_plan import require_memory
    from dj2mgm.training.settings import TrainingSettings


@command_line
def main() -> None:
    args = parse_arguments()
    preset, training = read_preset(args.preset)
    architecture = load_architecture(args.preset, Path(preset.model), text=True)
    settings = resolve_settings(training, args, architecture)
    print_batch(settings)
    print_plan(settings, architecture, find_training_machine(args))
    print_data(settings, preset, args.dry_run)
    if args.dry_run:
        print("dry run: nothing was launched")
        return
    sys.exit(launch_training(settings, preset, args.output_dir or Path("results/presets") / args.preset))


def read_preset(name: str) -> tuple[PresetFile, PretrainSection]:
    """Read config/presets/<name>.yaml, and its settings with the defaults of config.yaml's `pretrain`.

    Raises:
        InputError: there is no such file, or a key of it is unknown or of the wrong type.
    """
    path = locate_existing_file("presets", name, "--preset")
    preset = validate_settings(PresetFile, read_config(path, build_schema(PresetFile)), str(path))
    preset_layer, defaults = Layer(f"{path}, training", preset.training), read_default_layer()
    layers = [Layer(defaults.source, defaults.values["pretrain"]), preset_layer]
    return preset, validate_settings(PretrainSection, merge(layers), preset_layer.source, layers)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--deepspeed-config", type=Path, help="DeepSpeed JSON file (default: by the number of GPUs)")
    parser.add_argument("--gpu-memory", type=float, help="usable GiB of each GPU")
    parser.add_argument("--host-memory", type=float, help="usable GiB of main memory")
    parser.add_argument("--output-dir", type=Path)
    return parser.parse_args()


def resolve_settings(
    section: PretrainSection, args: argparse.Namespace, architecture: Architecture
) -> TrainingSettings:
    """Return the preset's settings with batch sizes and the content of its DeepSpeed configuration."""
    if args.deepspeed_config:
        config = complete_deepspeed_config(read_deepspeed_file(args.deepspeed_config), architecture.hidden_size)
    elif args.num_gpus in BY_GPU_COUNT:
        config = build_config_for_gpus(args.num_gpus, architecture.hidden_size)
    else:
        gpu_counts = ", ".join(map(str, BY_GPU_COUNT))
        raise InputError(
            f"--num-gpus {args.num_gpus}: there are configurations for {gpu_counts} only; pass --deepspeed-config"
        )
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    config_sizes = {
        "global_batch_size": config.get("train_batch_size", AUTO),
        "micro_batch_size": config.get("train_micro_batch_size_per_gpu", AUTO),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps", AUTO),
    }
    training = dict(section) | {key: size for key, size in config_sizes.items() if size != AUTO}
    if training["activation_checkpointing"] == AUTO:
        training["activation_checkpointing"] = True
    sizes = solve_batch(f"preset {args.preset}", training | {"gpus": args.num_gpus})
    if sizes["micro_batch_size"] == AUTO:
        raise InputError(
            f"preset {args.preset}: neither the preset nor the DeepSpeed configuration has micro_batch_size; set it"
        )
    common = {"seed": 0, "cpu_threads": None, "template": "plain"}
    return TrainingSettings(**training | sizes | common | {"deepspeed": with_batch(config, sizes)})


def print_batch(settings: TrainingSettings) -> None:
    micro, accumulation = settings.micro_batch_size, settings.gradient_accumulation_steps
    product = f"micro {micro} × accumulation {accumulation} × {settings.gpus} GPUs"
    print(f"batch: {product} = {settings.global_batch_size} samples a step")


def print_plan(settings: TrainingSettings, architecture: Architecture, machine: Machine) -> None:
    """Print the predicted memory by part; raise InputError if it does not fit."""
    dtype = torch.bfloat16 if settings.bf16 or (settings.precision == "auto" and machine.gpus) else torch.float32
    workload = Workload(architecture, "full", settings.max_length, settings.max_length, dtype)
    plan = require_memory(settings, workload, machine)
    for name in ("gpu", "host"):
        if parts := plan[name]:
            total = " + ".join(f"{part} {size:.2f}" for part, size in parts.items())
            print(f"{name} memory: {total} = {plan[f'{name}_gib']} GiB")


def print_data(settings: TrainingSettings, preset: PresetFile, dry_run: bool) -> None:
    """Print the size of the corpus, which may be missing in a dry run."""
    if dry_run and not Path(preset.data).exists():
        print(f"data: {preset.data} does not exist and was not checked; training needs it")
        return
    texts = sum(1 for _ in read_texts(Path(preset.data)))
    print(f"data: {texts:,} texts in {preset.data}, cut into samples of {settings.max_length} tokens")


def find_training_machine(args: argparse.Namespace) -> Machine:
    """Return this machine, or the machine that the flags describe."""
    if args.gpu_memory or args.num_gpus > max(1, torch.cuda.device_count()):
        return Machine(args.num_gpus, args.gpu_memory, args.host_memory)
    return read_free_memory(args.num_gpus)


def launch_training(settings: TrainingSettings, preset: PresetFile, output_dir: Path) -> int:
    """Run the training script on every GPU; return its exit status."""
    config = output_dir / "config.yaml"
    write_yaml(config, settings.model_dump())
    command = ["bash", SCRIPTS / "launch.sh", str(settings.gpus), str(settings.nodes), SCRIPTS / "train_text_model.py"]
    command += ["--config", config, "--data", preset.data, "--model", preset.model, "--output-dir", output_dir]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    main()
