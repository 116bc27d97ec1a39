"""Where rows went: how many there were after every step, from the dataset to the samples that were trained on.

The rows of stage 1 run in lanes. `original` holds rows with the caption they came with, `recaptioned` those whose
caption was written anew, `repeated` the copies that fill the budget, `dropped` everything that fell out on the way.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from files import read_jsonl
from reporting.experiment import Experiment, Run
from reporting.recaptions import Recaption
from reporting.scales import grouped, named_counts


@dataclass(frozen=True)
class Lanes:
    """Rows by lane. All but the repeated ones add up to the rows of the dataset."""

    original: int
    recaptioned: int = 0
    repeated: int = 0
    dropped: int = 0

    @property
    def left(self) -> int:
        return self.original + self.recaptioned + self.repeated


@dataclass(frozen=True)
class Step:
    """One operator or stage, and the rows after it."""

    name: str
    kind: str  # dataset, operator, recaption, file, repeat or trained
    lanes: Lanes
    dropped: int = 0  # by this step
    reasons: str = ""  # "undecodable 12, missing 1"; of a single reason the name, empty where none is recorded
    note: str = ""  # what the step did besides dropping


def pretrain_chain(experiment: Experiment, run: Run, recaptions: list[Recaption]) -> list[Step]:
    """Dataset, every operator of the filters and of the synthesis, the training file, the samples of stage 1."""
    lanes = Lanes(original=experiment.dataset_counts["pretrain"])
    steps = [Step("dataset", "dataset", lanes, note="image–caption pairs")]
    for operator in run.filter["operators"]:
        lanes = _drop(lanes, original=operator["dropped"])
        steps.append(_operator(operator, lanes))
    if run.synthesize:
        steps += _synthesis(run, lanes, [recaption for recaption in recaptions if recaption.caption is not None])
    steps += _training_file(run, steps[-1].lanes, {recaption.id for recaption in recaptions if recaption.accepted})
    lanes, samples = steps[-1].lanes, run.records["pretrain"]["samples"]
    note = f"{grouped(samples)} samples in {grouped(run.records['pretrain']['steps'])} steps"
    return [*steps, Step("trained on", "trained", lanes, note=note)]


def finetune_counts(experiment: Experiment, run: Run) -> list[tuple[str, int]]:
    """Instructions in the dataset, in the training file, and the samples that stage 2 saw."""
    written = run.jsonl["finetune"]
    brought = experiment.dataset_counts["finetune"]
    counts = [("in the dataset", brought) if brought else ("made from the pairs", written["rows_in"])]
    lost = {reason.replace("_", " "): number for reason, number in written["dropped"].items() if number}
    counts += [(f"left out: {reason}", -number) for reason, number in lost.items()]
    if repeated := written.get("repeated"):
        counts.append(("repeated", repeated))
    return [*counts, ("trained on", run.records["finetune"]["samples"])]


def _drop(lanes: Lanes, original: int = 0, recaptioned: int = 0) -> Lanes:
    return replace(
        lanes,
        original=lanes.original - original,
        recaptioned=lanes.recaptioned - recaptioned,
        dropped=lanes.dropped + original + recaptioned,
    )


def _operator(operator: dict, lanes: Lanes, kind: str = "operator", note: str = "") -> Step:
    reasons = _reasons(operator.get("broken_images") or {})
    return Step(operator["operator"], kind, lanes, operator["dropped"], reasons, note)


def _reasons(counts: dict[str, int]) -> str:
    found = {reason: count for reason, count in counts.items() if count}
    return next(iter(found)).replace("_", " ") if len(found) == 1 else named_counts(found)


def _synthesis(run: Run, lanes: Lanes, captioned: list[Recaption]) -> Iterator[Step]:
    """The operators of the synthesis; a dropped row counts in the lane it was in."""
    dropped = Counter(recaption.dropped_in_step for recaption in captioned)
    for operator in run.synthesize["operators"]:
        if "recaption" in operator and not lanes.recaptioned:
            lanes = replace(lanes, original=lanes.original - len(captioned), recaptioned=len(captioned))
            unusable = named_counts(operator["recaption"]["unusable"])
            note = f"{grouped(len(captioned))} recaptioned" + (f"; captions not usable: {unusable}" if unusable else "")
            yield _operator(operator, lanes, "recaption", note)
        else:
            of_recaptions = dropped[operator["step"]]
            lanes = _drop(lanes, operator["dropped"] - of_recaptions, of_recaptions)
            note = f"{grouped(of_recaptions)} of them recaptions" if of_recaptions else ""
            yield _operator(operator, lanes, note=note)


def _training_file(run: Run, lanes: Lanes, accepted: set[str]) -> Iterator[Step]:
    written = run.jsonl["pretrain"]
    dropped = sum(written["dropped"].values())
    if dropped:
        of_recaptions = 0
        if lanes.recaptioned:  # a copy's id is `<id>#<number>`, so copies are not counted
            ids = {row["id"] for row in read_jsonl(run.stages["jsonl"] / "pretrain.jsonl")}
            of_recaptions = lanes.recaptioned - len(accepted & ids)
        lanes = _drop(lanes, dropped - of_recaptions, of_recaptions)
    yield Step("training file", "file", lanes, dropped, _reasons(written["dropped"]))
    if repeated := written.get("repeated", 0):
        yield Step("fill the budget", "repeat", replace(lanes, repeated=repeated), note=f"{grouped(repeated)} repeated")
