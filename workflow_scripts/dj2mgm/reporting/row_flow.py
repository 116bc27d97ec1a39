"""Rows kept and dropped at each step, from the dataset to the training samples.

The rows run in lanes. `original` holds rows with the caption of the dataset, `recaptioned` rows with a rewritten
caption, `repeated` the repetitions up to the number of samples, `dropped` all dropped rows.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from dj2mgm.records.jsonl_summary import SourceSamples
from dj2mgm.records.recipe_summary import OperatorSummary
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.recaptions import RecaptionedRow
from dj2mgm.reporting.rendering import build_step_key, format_integer, list_counts
from dj2mgm.storage.files import read_jsonl


@dataclass(frozen=True)
class Lanes:
    """Rows by lane. All except the repeated ones add up to the rows of the dataset."""

    original: int
    recaptioned: int = 0
    repeated: int = 0
    dropped: int = 0

    @property
    def left(self) -> int:
        return self.original + self.recaptioned + self.repeated


@dataclass(frozen=True)
class FlowStep:
    """One operator or stage, and the rows after it."""

    name: str
    kind: str  # dataset, operator, recaption, file, repeat or trained
    lanes: Lanes
    dropped: int = 0  # rows that this step drops
    reasons: str = ""  # "undecodable 12, missing 1"; a single reason without its count; empty if none is recorded
    note: str = ""  # effects other than dropping rows
    key: str = ""  # `build_step_key` of an operator, for a link to the rows that it dropped


def build_pretrain_steps(
    experiment: ExperimentResults, run: RunResults, recaptions: list[RecaptionedRow]
) -> list[FlowStep]:
    """Return the steps of the pairs: dataset, all operators of filter and synthesis, training file, samples."""
    lanes = Lanes(original=experiment.dataset_counts["pretrain"])
    steps = [FlowStep("dataset", "dataset", lanes, note="image–caption pairs")]
    for operator in run.filter.operators:
        lanes = _move_to_dropped(lanes, original=operator.dropped)
        steps.append(_build_operator_step("filter", operator, lanes))
    if run.synthesize and not run.selects_instructions:
        steps += _build_synthesis_steps(
            run, lanes, [recaption for recaption in recaptions if recaption.caption is not None]
        )
    steps += _build_file_steps(run, steps[-1].lanes, {recaption.id for recaption in recaptions if recaption.accepted})
    lanes, record = steps[-1].lanes, next(iter(run.records.values()))
    rows, samples = record.rows, record.samples
    note = f"{format_integer(samples)} samples in {format_integer(record.steps)} steps"
    if samples != rows:
        note += f", {samples / rows:.2g} epochs"
        if record.planned_steps < record.steps:
            note += f", because one epoch has only {format_integer(record.planned_steps)} steps"
    elif "pretrain" not in run.records:
        note += f", including {format_integer(run.jsonl.files['finetune'].rows_out)} instructions"
    return [*steps, FlowStep("in the training file" if samples < rows else "trained on", "trained", lanes, note=note)]


def count_instructions(experiment: ExperimentResults, run: RunResults) -> list[tuple[str, int]]:
    """Count instructions from the dataset to the samples of stage 2.

    All counts before the last one add up to it, unless stage 2 also trains on the pairs.
    """
    file_counts = run.jsonl.files["finetune"]
    dataset_count = experiment.dataset_counts["finetune"]
    label = "made from the pairs" if file_counts.rows_in else "none"
    counts = [("in the dataset", dataset_count) if dataset_count else (label, file_counts.rows_in)]
    if run.selects_instructions:
        operators = [(operator.operator, operator.dropped) for operator in run.synthesize.operators]
        new_count = file_counts.rows_in + sum(number for _, number in operators) - dataset_count
        counts = [
            ("in the dataset", dataset_count),
            *([("new instructions about images of the pairs", new_count)] if new_count else []),
        ]
        counts += [(f"dropped by {name}", -number) for name, number in operators if number]
    dropped = {reason.replace("_", " "): number for reason, number in file_counts.dropped.items() if number}
    counts += [(f"dropped ({reason})", -number) for reason, number in dropped.items()]
    if file_counts.repeated:
        counts.append(("repeated", file_counts.repeated))
    rows, samples = run.records["finetune"].rows, run.records["finetune"].samples
    if "pretrain" not in run.records:
        return [*counts, ("trained on, with the pairs", samples)]
    if samples != rows:
        counts.append(
            ("not trained on (training ended first)" if samples < rows else "repeated in later epochs", samples - rows)
        )
    return [*counts, ("trained on", samples)]


def build_source_table(experiment: ExperimentResults, run: RunResults) -> list[dict]:
    """Tabulate the rows of each source to train on; empty for a dataset without sources."""
    samples = run.jsonl.files["pretrain"].sources | run.jsonl.files["finetune"].sources
    rows = []
    training_sources = {
        name: source
        for name, source in experiment.dataset_counts.get("sources", {}).items()
        if source.get("split") != "evaluation"
    }
    for name, source in training_sources.items():
        counts = samples.get(name, SourceSamples())
        times = counts.rows_out / counts.used if counts.used else 0.0
        license = experiment.licenses.get(name) or ""
        rows.append({"name": name, "license": license, **source, **asdict(counts), "times": times})
    return rows


def _move_to_dropped(lanes: Lanes, original: int = 0, recaptioned: int = 0) -> Lanes:
    return replace(
        lanes,
        original=lanes.original - original,
        recaptioned=lanes.recaptioned - recaptioned,
        dropped=lanes.dropped + original + recaptioned,
    )


def _build_operator_step(
    stage: str, operator: OperatorSummary, lanes: Lanes, kind: str = "operator", note: str = ""
) -> FlowStep:
    reasons = _format_reasons(operator.reports.get("broken_images", {}))
    return FlowStep(
        operator.operator, kind, lanes, operator.dropped, reasons, note, build_step_key(stage, operator.step)
    )


def _format_reasons(counts: dict[str, int]) -> str:
    reasons = {reason: count for reason, count in counts.items() if count}
    return next(iter(reasons)).replace("_", " ") if len(reasons) == 1 else list_counts(reasons)


def _build_synthesis_steps(run: RunResults, lanes: Lanes, recaptions: list[RecaptionedRow]) -> Iterator[FlowStep]:
    """Return the steps of the synthesis; each dropped row is subtracted from its own lane."""
    dropped = Counter(recaption.dropped_in_step for recaption in recaptions)
    for operator in run.synthesize.operators:
        if "recaption" in operator.reports and not lanes.recaptioned:
            lanes = replace(lanes, original=lanes.original - len(recaptions), recaptioned=len(recaptions))
            unusable = list_counts(operator.reports["recaption"]["unusable"])
            note = f"{format_integer(len(recaptions))} recaptioned" + (
                f"; unusable captions: {unusable}" if unusable else ""
            )
            yield _build_operator_step("synthesize", operator, lanes, "recaption", note)
        else:
            recaptioned = dropped[operator.step]
            lanes = _move_to_dropped(lanes, operator.dropped - recaptioned, recaptioned)
            note = f"{format_integer(recaptioned)} of them recaptioned" if recaptioned else ""
            yield _build_operator_step("synthesize", operator, lanes, note=note)


def _build_file_steps(run: RunResults, lanes: Lanes, accepted_ids: set[str]) -> Iterator[FlowStep]:
    counts = run.jsonl.files["pretrain"]
    dropped = sum(counts.dropped.values())
    if dropped:
        recaptioned = 0
        if lanes.recaptioned:  # repetitions have the id `<id>#<number>`, so they are not counted
            ids = {row["id"] for row in read_jsonl(run.stages["jsonl"] / "pretrain.jsonl")}
            recaptioned = lanes.recaptioned - len(accepted_ids & ids)
        lanes = _move_to_dropped(lanes, dropped - recaptioned, recaptioned)
    yield FlowStep("training file", "file", lanes, dropped, _format_reasons(counts.dropped))
    if counts.repeated:
        note = f"{format_integer(counts.repeated)} repeated"
        yield FlowStep("repeat rows", "repeat", replace(lanes, repeated=counts.repeated), note=note)
