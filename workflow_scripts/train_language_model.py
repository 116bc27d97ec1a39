r"""Train the tiny language model of the embedded default, which has Gemma's architecture, to read scenes.

    python workflow_scripts/train_language_model.py --config results/foundation/tiny/language_model.yaml \
        --output-dir results/foundation/tiny/language_model

Writes the model and its tokenizer, an ordinary `from_pretrained` folder.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.features.foundation.tiny_parts import train_language_model
    from dj2mgm.settings.models import LanguageModelRecipe
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import replace_folder


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--output-dir")
    spec = load_settings(LanguageModelRecipe, args.config)
    use_cpu_threads(None)
    set_seed(spec.seed)
    with replace_folder(args.output_dir) as folder:
        record = train_language_model(spec, folder)
    print(record, flush=True)


if __name__ == "__main__":
    main()
