r"""Make a tiny vision-language model of transformers' own classes from the embedded default's parts.

    python workflow_scripts/make_tiny_vlm.py --config results/models/tiny-llava/config.yaml \
        --output-dir results/models/tiny-llava/vlm

The configuration contains its kind (`tiny`) and the folders of the parts (`language_model`, `vision_tower`).
"""

from pathlib import Path

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.compute import set_seed
    from dj2mgm.files import read_yaml, replace_folder
    from dj2mgm.foundation.tiny_vlms import make_tiny_vlm


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--output-dir")
    settings = read_yaml(args.config)
    set_seed(0)
    parts = (Path(settings[part]) for part in ("language_model", "vision_tower"))
    model, processor = make_tiny_vlm(settings["tiny"], *parts)
    with replace_folder(args.output_dir) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
