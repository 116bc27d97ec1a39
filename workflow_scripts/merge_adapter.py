r"""Merge a base model and the trained weights of a stage into one model folder, for `from_pretrained` and for sharing.

    python workflow_scripts/merge_adapter.py --model results/models/mgm-2b/mgm \
        --stage results/shapes/mgm-2b/baseline/finetune \
        --output-dir exported/baseline

LoRA is merged into the language model's weights, which keep their dtype. The folder can be used without PEFT.
"""

from dj2mgm.cli.command_line import parse_paths, quiet_command_line, quiet_imports

with quiet_imports():
    from dj2mgm.errors import InputError
    from dj2mgm.models.generators import load_family
    from dj2mgm.storage.files import replace_folder


@quiet_command_line
def main() -> None:
    args = parse_paths(__doc__, "--model", "--stage", "--output-dir")
    if args.output_dir.exists():
        raise InputError(f"{args.output_dir} exists already; name a new folder, or delete it first")
    family = load_family(args.model)
    model = family.load_trained_model(args.stage, dtype="auto")
    with replace_folder(args.output_dir) as folder:
        model.save_pretrained(folder)
        family.save_processor(folder)


if __name__ == "__main__":
    main()
