r"""Read the score and the cost of the trials of a batch, and take the next interim look at the winner.

    python workflow_scripts/score_trials.py --config results/my_search/search/1a2b3c4d/batch-1/config.yaml \
        --study config/studies/my_search.yaml --rows results/baseline/jsonl/summary.json \
        --trials results/my_search/search/1a2b3c4d/batch-1/trials.yaml \
        --output results/my_search/search/1a2b3c4d/batch-1/scores.yaml

Without `--trials`, the batch is batch 0: the experiment that the trials change. The configuration lists finished
trials. `--earlier` names the scores of earlier batches. If they contain looks at this winner, the new look continues
their sequence.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.records.jsonl_summary import JsonlSummary, read_jsonl_summary
from dj2mgm.records.look_records import LookRecord
from dj2mgm.records.page_records import BatchSettings
from dj2mgm.records.search_records import BatchRecord, BatchResult, format_run_name
from dj2mgm.reporting.experiment import ExperimentResults, load_experiments
from dj2mgm.reporting.study.trial_scores import find_trial_score, measure_trial
from dj2mgm.reporting.verdicts.look_verdict import take_look
from dj2mgm.runs.stages import TRAINING
from dj2mgm.runs.studies.seed_times import sum_seconds
from dj2mgm.runs.studies.study_designs import read_study_file
from dj2mgm.settings.targets import DecideSection
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="summary.json of the baseline's training files")
    parser.add_argument("--trials", type=Path)
    parser.add_argument("--earlier", type=Path, nargs="*", default=[])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    settings = load_settings(BatchSettings, args.config)
    experiments = load_experiments(args.config) if settings.experiments else []
    finished = {experiment.name: experiment for experiment in experiments}
    record = load_settings(BatchRecord, args.trials) if args.trials else None
    fraction = record.fraction if record else 1
    kind = find_trial_score(experiments, settings.goals, fraction) if experiments else None
    if record:
        trials = {trial.name: format_run_name(trial.name, record.fraction) for trial in record.trials}
    else:
        trials = {name: name for name in finished}
    scores = {
        name: measure_trial(finished[run], kind, settings.goals, fraction) if run in finished else None
        for name, run in trials.items()
    }
    all_runs = {(experiment.name, seed) for experiment in experiments for seed in experiment.seeds}
    new_runs = find_new_runs(record, args.earlier) if record else all_runs
    new_seeds = [[seed for name, seed in new_runs if name == experiment.name] for experiment in experiments]
    experiment_seeds = list(zip(experiments, new_seeds, strict=True))
    seconds = [sum_gpu_seconds(experiment, seeds) for experiment, seeds in experiment_seeds]
    fixed_seconds = [sum_gpu_seconds(experiment, seeds, without=TRAINING) for experiment, seeds in experiment_seeds]
    rows = read_jsonl_summary(args.rows)
    full_size_trials = trials if record and record.fraction == 1 else ()
    result = BatchResult(
        scores=scores,
        runs=len(new_runs),
        seconds=sum(filter(None, seconds)) if any(seconds) else None,
        fixed_seconds=sum(filter(None, fixed_seconds)),
        fewer_rows=[
            name for name in full_size_trials if name in finished and has_fewer_rows(finished[name].runs[0].jsonl, rows)
        ],
        looks=look_at_winner(finished, record, args.earlier, args.study) if record and record.against else {},
    )
    write_yaml(args.output, result.model_dump())


def find_new_runs(record: BatchRecord, earlier: list[Path]) -> set[tuple[str, int]]:
    """Return experiment and seed of the trainings that no earlier batch has; batch 0 has no trials."""
    batches = [load_settings(BatchRecord, file.with_name("trials.yaml")) for file in earlier[1:]]
    return record.runs.difference(*(batch.runs for batch in batches))


def sum_gpu_seconds(experiment: ExperimentResults, seeds: list[int], without: tuple[str, ...] = ()) -> float | None:
    """Return the GPU seconds of the stages in an experiment's own folder for these seeds, without shared stages."""
    stages = [item for run in experiment.runs if run.seed in seeds for item in run.stages.items()]
    folders = {folder for stage, folder in stages if experiment.name in folder.parts and stage not in without}
    seconds = sum_seconds(folders) if folders else 0.0
    return None if seconds is None else seconds * experiment.config.gpus


def has_fewer_rows(own_summary: JsonlSummary, reference_summary: JsonlSummary) -> bool:
    """Return whether a run has fewer different rows in the file that it filters, and not more rows in the other file.

    Args:
        own_summary: numbers of the run.
        reference_summary: numbers of the reference.
    """
    selected = "finetune" if "synthesized" in own_summary.inputs else "pretrain"
    rows = {
        name: [summary.files[name].different_rows for summary in (own_summary, reference_summary)]
        for name in own_summary.files
    }
    return rows[selected][0] < rows[selected][1] and all(
        own_rows <= reference_rows for own_rows, reference_rows in rows.values()
    )


def look_at_winner(
    finished: dict[str, ExperimentResults], record: BatchRecord, earlier: list[Path], study: Path
) -> dict[str, LookRecord]:
    """Return the look at the winner against each experiment; experiments whose training diverged are omitted."""
    design = read_study_file(study).design
    budget, winner = DecideSection(seeds=design.confirm_seeds), record.trials[0].name
    earlier_looks: dict[str, list[LookRecord]] = {reference: [] for reference in record.against}
    for file in earlier:
        for reference, look in load_settings(BatchResult, file).looks.items():
            if reference in earlier_looks and look.experiment == winner:
                earlier_looks[reference].append(look)
    looks = {}
    for reference in record.against:
        if winner in finished and reference in finished:
            peers = [finished[name] for name in record.against if name in finished and name != reference]
            look = take_look([finished[reference], finished[winner]], earlier_looks[reference], budget, peers)
            looks[reference] = look.model_copy(update={"command": ""})  # the search itself continues
    return looks


if __name__ == "__main__":
    main()
