r"""Assemble a language model, a CLIP tower and a ConvNeXt into one MGM folder for `from_pretrained`.

    python workflow_scripts/assemble_model.py --config results/models/tiny/config.yaml \
        --output-dir results/models/tiny/mgm

The parts are local folders or hub ids. Projector and mining layers are random until stage 1 trains them.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.compute import set_seed
    from dj2mgm.models.mgm.assemble import assemble
    from dj2mgm.settings.models import MgmAssembly
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import replace_folder


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--output-dir")
    settings = load_settings(MgmAssembly, args.config)
    set_seed(0)
    model, processor = assemble(**dict(settings))
    with replace_folder(args.output_dir) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
