r"""Plan the next batch of a search, and ask Optuna for its new trials.

    python workflow_scripts/ask_trials.py --search results/shapes/tiny/my_search/search/1a2b3c4d/search.yaml \
        --study config/studies/my_search.yaml \
        --scores results/shapes/tiny/my_search/search/1a2b3c4d/batch-0/scores.yaml \
        --output results/shapes/tiny/my_search/search/1a2b3c4d/batch-1/trials.yaml

`--scores` takes the files of all earlier batches, in their order. The budget in the study's design counts. Batch 0 is
the experiment that the trials change.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.cli.messages import note
from dj2mgm.errors import pluralize
from dj2mgm.features.studies.halving import read_history
from dj2mgm.features.studies.study_records import SearchSettings, read_study_file
from dj2mgm.features.studies.trials import ask_for_batch
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--search", "--study", "--output", lists=("--scores",))
    search = load_settings(SearchSettings, args.search)
    budget = read_study_file(args.study).design
    history = read_history(budget, search, args.scores)
    batch = ask_for_batch(history)
    write_yaml(args.output, batch.model_dump())
    note(
        f"batch {len(args.scores)}: {batch.step}, {pluralize(len(batch.trials), 'trial')}, "
        f"{batch.fraction:g} of the rows"
    )


if __name__ == "__main__":
    main()
