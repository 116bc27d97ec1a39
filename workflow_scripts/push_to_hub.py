r"""Push a published folder to the Hugging Face hub in one commit.

    python workflow_scripts/push_to_hub.py --folder results/published/shapes/tiny/dj_synth/model --kind model \
        --repository me/my-model --private --output results/published/shapes/tiny/dj_synth/model.pushed.json

The token comes from HF_TOKEN or from `hf auth login`.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.features.publish.pushing import push
from dj2mgm.storage.files import write_json


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    for flag in ("--folder", "--output"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--kind", choices=("model", "dataset"), required=True)
    parser.add_argument("--repository", required=True, help="owner/name")
    parser.add_argument("--private", action="store_true", help="create a new repository as private")
    args = parser.parse_args()
    commit = push(args.folder, args.kind, args.repository, args.private)
    write_json(args.output, {"repository": args.repository, "commit": commit})
    print(f"pushed: {commit}", flush=True)


if __name__ == "__main__":
    main()
