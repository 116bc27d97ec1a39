"""Rows kept, rewritten and dropped at each step, from the dataset to the training samples.

The rows run in lanes. `original` holds rows with the caption of the dataset, `recaptioned` rows with a rewritten
caption, `repeated` the repetitions up to the number of samples, `dropped` all dropped rows.

A diagram shows them as bands, as wide as the number of rows. Each step is a drawing of WIDTH × HEIGHT units. The page
stretches it to the height of the step's text, so that labels cannot overlap.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from dj2mgm.evaluation.caption_attributes import is_true
from dj2mgm.records import OperatorSummary, SourceSamples, read_image_root
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import build_step_key, format_integer, list_counts, load_thumbnail, select_evenly
from dj2mgm.storage.files import read_jsonl

RECAPTIONS_SHOWN = 12
WIDTH, HEIGHT = 1000.0, 100.0
DROPPED_GAP = 0.11  # between kept and dropped rows, as a share of the rows
LANE_GAP = 0.02  # between the lanes of kept rows
Edges = tuple[float, float]  # left and right, in rows


@dataclass(frozen=True)
class RecaptionedRow:
    """A row with a caption of low similarity to its image, and the captioner's new caption."""

    id: str
    original: str
    original_similarity: float
    caption: str | None  # None: the captioner returned no usable caption, for the reason in `problem`
    similarity: float | None
    log_likelihood: float | None  # nats; None if the captioner gives none
    problem: str | None
    dropped_by: str | None  # operator
    dropped_in_step: int | None

    @property
    def accepted(self) -> bool:
        return self.caption is not None and self.dropped_by is None


def read_recaptions(run: RunResults) -> list[RecaptionedRow]:
    """Read the rewritten captions of a run, sorted by id; empty if it has no stage synthesize."""
    if "synthesize" not in run.stages:
        return []
    folder = run.stages["synthesize"]
    rows = [row for row in read_jsonl(folder / "synthesized.jsonl") if row.get("recaption")]
    rows += [row for row in read_jsonl(folder / "dropped.jsonl") if row["event"] == "dropped" and row.get("recaption")]
    recaptions = [
        RecaptionedRow(
            row["id"],
            record["original"],
            record["original_similarity"],
            record["caption"],
            record["similarity"],
            record["log_likelihood"],
            record.get("problem"),
            row.get("operator"),
            row.get("step"),
        )
        for row in rows
        for record in [row["recaption"]]
    ]
    return sorted(recaptions, key=lambda recaption: recaption.id)


def read_truth(experiment: ExperimentResults) -> dict[str, dict]:
    """Read the rows of ground_truth.jsonl by id; empty if the dataset has none."""
    path = experiment.dataset / "ground_truth.jsonl"
    return {row["id"]: row for row in read_jsonl(path)} if path.is_file() else {}


@dataclass(frozen=True)
class QualityFigure:
    """A measure of the synthesis against ground truth."""

    value: str
    meaning: str


def measure_synthesis_quality(
    run: RunResults, recaptions: list[RecaptionedRow], truth: dict[str, dict]
) -> list[QualityFigure]:
    """Return the shares of mismatched and clean pairs that were replaced or dropped, and of true new captions."""
    if not recaptions or not truth:
        return []
    pair_ids = {row["id"] for row in read_jsonl(run.stages["filter"] / "filtered.jsonl")}
    remaining_ids = {row["id"] for row in read_jsonl(run.stages["synthesize"] / "stats.jsonl")}
    changed_ids = {recaption.id for recaption in recaptions} | (pair_ids - remaining_ids)
    figures = []
    for fault, description in (
        ("mismatched", "captions swapped between images on purpose"),
        ("clean", "correct captions"),
    ):
        fault_ids = {identifier for identifier in pair_ids if truth[identifier]["fault"] == fault}
        if fault_ids:
            share = f"{100 * len(fault_ids & changed_ids) / len(fault_ids):.1f} %"
            figures.append(
                QualityFigure(share, f"of {format_integer(len(fault_ids))} {description} were replaced or dropped")
            )
    accepted = [recaption for recaption in recaptions if recaption.accepted]
    if accepted:
        right = sum(is_true(recaption.caption, truth[recaption.id]["caption"]) for recaption in accepted)
        share = f"{100 * right / len(accepted):.1f} %"
        figures.append(
            QualityFigure(share, f"of {format_integer(len(accepted))} accepted new captions state nothing false")
        )
    return figures


@dataclass(frozen=True)
class RecaptionItem:
    """A recaptioned row in the gallery; `true` and `original_true` are None without ground truth."""

    recaption: RecaptionedRow
    image: str  # data URI
    original_true: bool | None
    true: bool | None


def build_recaption_gallery(
    run: RunResults, recaptions: list[RecaptionedRow], truth: dict[str, dict], items: int = RECAPTIONS_SHOWN
) -> list[RecaptionItem]:
    """Return rows evenly spread over all recaptioned rows, sorted by id."""
    examples = select_evenly(recaptions, items)
    if not examples:
        return []
    root = read_image_root(run.stages["synthesize"])
    ids = {recaption.id for recaption in examples}
    rows = read_jsonl(run.stages["filter"] / "filtered.jsonl")
    images = {row["id"]: row["images"][0] for row in rows if row["id"] in ids}

    def judge(caption: str | None, identifier: str) -> bool | None:
        return is_true(caption, truth[identifier]["caption"]) if caption and identifier in truth else None

    return [
        RecaptionItem(
            recaption,
            load_thumbnail(root, images[recaption.id]),
            judge(recaption.original, recaption.id),
            judge(recaption.caption, recaption.id),
        )
        for recaption in examples
    ]


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


@dataclass(frozen=True)
class Shape:
    """A band of the flow diagram."""

    lane: str  # original, recaptioned, repeated or dropped; sets the color
    path: str
    title: str = ""


def draw_flows(chains: list[list[FlowStep]]) -> list[list[list[Shape]]]:
    """Return the shapes of each step of each chain; all chains have the same scale."""
    edges_by_chain = [_LaneEdges(steps) for steps in chains]
    total_width = max(edges.total_width for edges in edges_by_chain) or 1.0
    return [
        [_draw_step(edges, total_width, steps[max(index - 1, 0)].lanes, step) for index, step in enumerate(steps)]
        for edges, steps in zip(edges_by_chain, chains, strict=True)
    ]


class _LaneEdges:
    """Edges of the lanes, in rows. Rows with new captions keep their position, so that no lane moves sideways."""

    def __init__(self, steps: list[FlowStep]):
        rows = max(lanes.original + lanes.recaptioned + lanes.dropped for lanes in (step.lanes for step in steps))
        self.gap = LANE_GAP * rows
        original = next((step.lanes.original for step in steps if step.kind == "recaption"), None)
        self.start = self.gap + (steps[-1].lanes.original if original is None else original)
        last = steps[-1].lanes
        self.total_width = max((1 + LANE_GAP) * rows, self.locate_repeated(last)[1] + LANE_GAP * rows + last.dropped)

    def locate_recaptioned(self, lanes: Lanes) -> Edges:
        return self.start, self.start + lanes.recaptioned

    def locate_repeated(self, lanes: Lanes) -> Edges:
        left = self.start + (lanes.recaptioned + self.gap if lanes.recaptioned else 0)
        return left, left + lanes.repeated


def _draw_step(edges: _LaneEdges, total_width: float, before: Lanes, step: FlowStep) -> list[Shape]:
    """Draw straight bands for rows that stay in their lane, then curved bands for rows that change it."""
    after, shapes = step.lanes, []

    def draw_band(lane: str, top: Edges, bottom: Edges, title: str = "") -> None:
        if max(top[1] - top[0], bottom[1] - bottom[0]) > 0:
            shapes.append(Shape(lane, _build_path(top, bottom, WIDTH / total_width), title))

    draw_band("original", (0, after.original), (0, after.original))
    if step.kind != "recaption":
        draw_band("recaptioned", edges.locate_recaptioned(after), edges.locate_recaptioned(after))
    draw_band("dropped", (total_width - before.dropped, total_width), (total_width - before.dropped, total_width))
    if step.kind == "recaption":
        draw_band("recaptioned", (after.original, before.original), edges.locate_recaptioned(after), step.note)
    if step.kind == "repeat":
        left, right = edges.locate_repeated(after)
        draw_band("repeated", (left - edges.gap, left - edges.gap), (left, right), step.note)
    elif after.repeated:
        draw_band("repeated", edges.locate_repeated(after), edges.locate_repeated(after))
    if step.dropped:
        _draw_dropped(draw_band, edges, total_width, before, step)
    return shapes


def _draw_dropped(draw_band: Callable, edges: _LaneEdges, total_width: float, before: Lanes, step: FlowStep) -> None:
    """Draw bands from the right edges of the lanes to the left edge of the rows dropped before."""
    after, left = step.lanes, total_width - step.lanes.dropped
    recaptions_end = edges.locate_recaptioned(after)[1]
    for rows, edge in (
        (before.original - after.original, after.original),
        (before.recaptioned - after.recaptioned, recaptions_end),
    ):
        if rows > 0:
            draw_band(
                "dropped",
                (edge, edge + rows),
                (left, left + rows),
                f"{step.name}: {format_integer(step.dropped)} dropped",
            )
            left += rows


def _build_path(top: Edges, bottom: Edges, scale: float) -> str:
    """Return a band from two edges at the top to two edges at the bottom, all with vertical tangents."""
    a, b, c, d = (f"{edge * scale:.1f}" for edge in (*top, *bottom))
    if (a, b) == (c, d):
        return f"M{a} 0H{b}V{HEIGHT:g}H{a}Z"
    middle = HEIGHT / 2
    return f"M{a} 0C{a} {middle:g} {c} {middle:g} {c} {HEIGHT:g}H{d}C{d} {middle:g} {b} {middle:g} {b} 0Z"
