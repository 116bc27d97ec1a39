"""Writes DeepSpeed configurations for 1, 2, 4, 6 and 8 GPUs, and for each ZeRO stage, sized for one model.

    python workflow_scripts/write_deepspeed_configs.py --config results/models/tiny/config.yaml \\
        --output-dir results/deepspeed_configs

What is left "auto" (learning rate, precision, clipping) transformers fills in from its training arguments.
"""

from command_line import command_line, path_arguments
from files import read_yaml, write_json
from planning.architecture import load_architecture
from settings.batch import solve_batch
from settings.deepspeed import read_deepspeed
from training.deepspeed_config import BY_GPU_COUNT, complete_deepspeed_config, with_batch

PLAIN = ("zero2_offload", "zero3", "zero3_offload")  # without batch sizes, for any number of GPUs


@command_line
def main() -> None:
    args = path_arguments(__doc__, "--config", "--output-dir")
    hidden_size = load_architecture(str(args.config), read_yaml(args.config)).hidden_size

    def config_of(name: str) -> dict:
        return complete_deepspeed_config(read_deepspeed(name, "config"), hidden_size)

    for gpus, (micro, accumulation, name) in BY_GPU_COUNT.items():
        factors = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "gpus": gpus}
        sizes = solve_batch(f"{gpus} GPUs", factors | {"global_batch_size": None})
        write_json(args.output_dir / f"deepspeed_{gpus}gpu.json", with_batch(config_of(name), sizes))
    for name in PLAIN:
        write_json(args.output_dir / f"{name}.json", config_of(name))


if __name__ == "__main__":
    main()
