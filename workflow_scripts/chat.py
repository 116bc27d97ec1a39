r"""Answer one question about one image.

    python workflow_scripts/chat.py --model exported/baseline --image photo.jpg --question "What is this?"
    python workflow_scripts/chat.py --model results/models/tiny/mgm --stage results/shapes/tiny/baseline/pretrain \
        --image photo.jpg --template plain

The model is a merged, assembled or converted folder; --stage adds the weights that `pretrain` or `finetune` wrote.
--template is the `template` in the model's file in config/models: the name of a file in config/chat_templates, or
`tokenizer` for the tokenizer's own format. With `plain`, the model writes a caption and takes no question.
"""

from pathlib import Path

from dj2mgm.cli.command_line import make_parser, quiet_command_line, quiet_imports

with quiet_imports():
    from dj2mgm.data.images import BadImageError, load_image
    from dj2mgm.errors import InputError
    from dj2mgm.models.generators import load_generator
    from dj2mgm.settings.models import list_chat_template_names


@quiet_command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--stage", type=Path)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--question", default="")
    parser.add_argument("--template", choices=list_chat_template_names(), default="gemma")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    if not args.image.is_file():
        raise InputError(f"--image {args.image}: there is no such file")
    try:
        load_image(args.image)  # checked before the model is loaded
    except BadImageError as error:
        raise InputError(f"--image: {error}; name another image") from None
    generator = load_generator(args.model, args.stage)
    [answer] = generator.answer([args.image], [args.question], args.template, args.max_new_tokens, batch_size=1)
    print(answer)


if __name__ == "__main__":
    main()
