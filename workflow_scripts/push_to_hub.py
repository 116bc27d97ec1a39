r"""Push a published folder to the Hugging Face hub in one commit, after checking its card against the run's record.

    python workflow_scripts/push_to_hub.py --config results/published/shapes/tiny/dj_synth/config.yaml \
        --folder results/published/shapes/tiny/dj_synth/model --kind model --repository me/my-model --private \
        --output results/published/shapes/tiny/dj_synth/model.pushed.json

The token comes from HF_TOKEN or from `hf auth login`.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.publishing.card_check import check_card
from dj2mgm.publishing.pushing import push
from dj2mgm.publishing.run_record import select_dataset_records
from dj2mgm.records.publication_records import PublishSettings
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_json


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    for flag in ("--config", "--folder", "--output"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--kind", choices=("model", "dataset"), required=True)
    parser.add_argument("--repository", required=True, help="owner/name")
    parser.add_argument("--private", action="store_true", help="create a new repository as private")
    args = parser.parse_args()
    records = load_settings(PublishSettings, args.config).records
    check_card(args.folder, records if args.kind == "model" else select_dataset_records(records))
    commit = push(args.folder, args.kind, args.repository, args.private)
    write_json(args.output, {"repository": args.repository, "commit": commit})
    print(f"pushed: {commit}", flush=True)


if __name__ == "__main__":
    main()
