r"""Train the tiny CLIP and the tiny high-resolution ConvNeXt of the embedded default.

    python workflow_scripts/train_clip.py --config results/foundation/tiny/clip.yaml \
        --output-dir results/foundation/tiny

Writes clip/ and convnext/, ordinary `from_pretrained` folders.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.features.foundation.tiny_parts import train_clip
    from dj2mgm.settings.models import ClipRecipe
    from dj2mgm.settings.validation import load_settings


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--output-dir")
    spec = load_settings(ClipRecipe, args.config)
    use_cpu_threads(None)
    set_seed(spec.seed)
    record = train_clip(spec, args.output_dir / "clip", args.output_dir / "convnext")
    print(record, flush=True)


if __name__ == "__main__":
    main()
