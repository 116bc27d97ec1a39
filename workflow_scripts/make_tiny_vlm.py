r"""Make a tiny vision-language model of transformers' own classes from the embedded default's parts.

    python workflow_scripts/make_tiny_vlm.py --config results/models/tiny-llava/config.yaml \
        --output-dir results/models/tiny-llava/vlm

Writes the model and its processor, an ordinary `from_pretrained` folder.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.compute import set_seed
    from dj2mgm.features.foundation.tiny_vlms import make_tiny_vlm
    from dj2mgm.settings.models import TinyAssembly
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import replace_folder


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--output-dir")
    settings = load_settings(TinyAssembly, args.config)
    set_seed(0)
    model, processor = make_tiny_vlm(settings.tiny, Path(settings.language_model), Path(settings.vision_tower))
    with replace_folder(args.output_dir) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
