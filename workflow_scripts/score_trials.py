r"""Read the score and the cost of the trials of a batch.

    python workflow_scripts/score_trials.py --config results/shapes/tiny/my_search/search/1a2b3c4d/batch-1/config.yaml \
        --rows results/shapes/tiny/baseline/jsonl/summary.json \
        --trials results/shapes/tiny/my_search/search/1a2b3c4d/batch-1/trials.yaml \
        --output results/shapes/tiny/my_search/search/1a2b3c4d/batch-1/scores.yaml

`--rows` takes summary.json of the baseline's training files. Without `--trials`, the batch is batch 0: the experiment
that the trials change. The configuration lists finished trials.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.features.studies.study_records import BatchRecord, BatchSettings
from dj2mgm.features.studies.trial_scores import build_batch_result
from dj2mgm.records import read_jsonl_summary
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--rows", "--output", optional=("--trials",))
    settings = load_settings(BatchSettings, args.config)
    experiments = load_experiments(args.config) if settings.experiments else []
    record = load_settings(BatchRecord, args.trials) if args.trials else None
    result = build_batch_result(experiments, record, settings.goals, read_jsonl_summary(args.rows))
    write_yaml(args.output, result.model_dump())


if __name__ == "__main__":
    main()
