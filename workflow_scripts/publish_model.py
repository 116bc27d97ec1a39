r"""Write a trained model in the format of stock libraries, with a card from the record.

    python workflow_scripts/publish_model.py --config results/published/shapes/tiny/dj_synth/config.yaml \
        --model=results/models/tiny/mgm --stage results/shapes/tiny/dj_synth/finetune \
        --output-dir results/published/shapes/tiny/dj_synth/model

The folder is complete or missing.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.features.publish.cards import build_model_card
    from dj2mgm.features.publish.publication import RunRecord, copy_records, refuse_unlearned, reporting_full_disk
    from dj2mgm.features.publish.publish_settings import PublishSettings
    from dj2mgm.features.publish.stock_weights import drop_code, write_adapter, write_merged
    from dj2mgm.models.generators import load_family
    from dj2mgm.records import VERDICT_FILE
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import replace_folder


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--model", "--stage", "--output-dir")
    settings = load_settings(PublishSettings, args.config)
    refuse_unlearned(settings.experiment, settings.records[VERDICT_FILE], settings.allow_unlearned)
    family = load_family(args.model)
    tokens = settings.max_new_tokens
    with reporting_full_disk(args.output_dir), replace_folder(args.output_dir) as folder:
        copy_records(settings.records, folder, "model", settings)
        if settings.weights == "merged":
            write_merged(family, args.stage, tokens, folder)
        else:
            write_adapter(family, args.stage, settings.adapter_base, tokens, folder)
        drop_code(folder)
        adapter, chat = (args.stage / "adapter").is_dir(), bool(getattr(family.processor, "chat_template", None))
        build_model_card(settings, RunRecord(folder), adapter, chat).save(folder / "README.md")
    print(f"wrote {args.output_dir}", flush=True)


if __name__ == "__main__":
    main()
