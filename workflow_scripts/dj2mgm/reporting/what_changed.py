"""Differences of an experiment from the reference: settings, training rows by cause, and three held-out answers."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.data.training_jsonl import drop_repeats
from dj2mgm.recipes.catalogue import INSTRUCTION_OPERATOR
from dj2mgm.reporting.comparison import describe_data_difference, find_obstacle, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import format_integer, load_thumbnail
from dj2mgm.reporting.sections.gallery import build_questions, read_outputs
from dj2mgm.reporting.sections.run_details import SettingRow, label_operators, list_config_differences
from dj2mgm.score_groups import FINETUNED, OWN_GROUP
from dj2mgm.storage.files import read_jsonl

FILE_STEP = "training file"
FILE_SETTINGS = ("jsonl.", "sources.", "shares.")  # settings that choose rows of the recipes for the training file
IN_RECIPES = ("arguments", "without")  # settings that the recipes' own differences show
SHOWN_CHANGES = 8
NO_ROW = "no row"
RIGHT = {True: ("✓", "good"), False: ("✗", "bad")}
STRIP_SIDE = 224  # px of an image, shown at half of it
RECIPE = " recipe: "  # between a stage and its operator in names of settings


@dataclass(frozen=True)
class RowComparison:
    """Different rows of two training files; reference − dropped + added = experiment.

    Attributes:
        unit: pairs or instructions.
        reference: number of the reference's rows.
        experiment: number of the experiment's rows.
        causes: numbers of dropped, added and changed rows by operator (`filter recipe: <name>`) or `FILE_STEP`.
    """

    unit: str
    reference: int
    experiment: int
    causes: dict[str, Counter[str]]

    @property
    def totals(self) -> Counter[str]:
        return sum(self.causes.values(), Counter())


@dataclass(frozen=True)
class Change:
    """Settings of one operator or stage that differ, and their effect on the training rows."""

    settings: list[tuple[str, str]]  # name, and "old → new"
    effect: str  # empty if the settings do not choose rows


@dataclass(frozen=True)
class StripAnswer:
    """An answer or a caption of one side, with its mark."""

    experiment: str
    text: str
    mark: str
    tone: str  # good, bad or empty


@dataclass(frozen=True)
class StripItem:
    """A held-out image with a question or a caption, and both sides' answers."""

    title: str
    image: str  # data URI
    identifier: str
    question: str  # empty for captions
    truth: str
    answers: list[StripAnswer]


@dataclass(frozen=True)
class Strip:
    """Held-out images, one for each outcome that occurs, and how often each outcome occurs."""

    note: str
    items: list[StripItem]


@dataclass(frozen=True)
class WhatChanged:
    """Differences of an experiment from the reference."""

    experiment: str
    changes: list[Change]
    hidden: int  # number of further settings that differ
    rows: list[RowComparison]  # empty if the datasets differ
    strip: Strip | None


def describe_changes(experiments: list[ExperimentResults]) -> list[WhatChanged]:
    """Return the differences of each later experiment from the first one; controls describe theirs themselves."""
    reference = experiments[0]
    described = []
    for experiment in experiments[1:]:
        if not experiment.control:
            rows = compare_rows(experiment, reference) if experiment.dataset == reference.dataset else []
            changes, hidden = list_changes(experiment, reference, rows)
            strip = build_strip(reference, experiment)
            described.append(WhatChanged(experiment.name, changes, hidden, rows, strip))
    return described


def _pair_runs(experiment: ExperimentResults, reference: ExperimentResults) -> tuple[RunResults, RunResults]:
    """Return the experiment's first run, and the reference's run with its seed, or its first one if it has none."""
    run = experiment.runs[0]
    return run, next((other for other in reference.runs if other.seed == run.seed), reference.runs[0])


def compare_rows(experiment: ExperimentResults, reference: ExperimentResults) -> list[RowComparison]:
    """Compare the training files of the first seed: pairs, and the instructions if they are not made from the pairs."""
    runs = _pair_runs(experiment, reference)
    has_instructions = reference.dataset_counts["finetune"] or any(run.selects_instructions for run in runs)
    splits = {"pretrain": "pairs"} | ({"finetune": "instructions"} if has_instructions else {})
    sides = list(zip((experiment, reference), runs, strict=True))
    return [
        RowComparison(
            unit,
            *(run.jsonl.files[split].different_rows for run in runs[::-1]),
            {} if runs[0].stages["jsonl"] == runs[1].stages["jsonl"] else _count_causes(split, sides),
        )
        for split, unit in splits.items()
    ]


def _count_causes(split: str, sides: list[tuple[ExperimentResults, RunResults]]) -> dict[str, Counter[str]]:
    """Count the rows that differ between the experiment's and the reference's training file, by cause and kind."""
    rows, reference_rows = (_read_texts(run.stages["jsonl"] / f"{split}.jsonl") for _, run in sides)
    events, reference_events = (_read_events(split, *side) for side in sides)
    writers = [label for label in _label_steps(sides[0][0], "synthesize") if INSTRUCTION_OPERATOR in label]
    writer = writers[0] if writers and split == "finetune" else FILE_STEP
    causes: dict[str, Counter[str]] = {}
    for identifier in reference_rows | rows:
        if identifier not in rows:
            kind, cause = "dropped", events["dropped"].get(identifier, FILE_STEP)
        elif identifier not in reference_rows:
            kind, cause = "added", reference_events["dropped"].get(identifier, writer)
        elif rows[identifier] != reference_rows[identifier]:
            cause = events["changed"].get(identifier) or reference_events["changed"].get(identifier, FILE_STEP)
            kind = "changed"
        else:
            continue
        causes.setdefault(cause, Counter())[kind] += 1
    return causes


def _read_texts(file: Path) -> dict[str, int]:
    """Return a hash of each different row's texts by id."""
    return {row["id"]: hash(json.dumps(row.get("conversations"))) for row in drop_repeats(read_jsonl(file))}


def _read_events(split: str, experiment: ExperimentResults, run: RunResults) -> dict[str, dict[str, str]]:
    """Return the operator that dropped a row, and the last one that changed it, by kind of event and id."""
    events: dict[str, dict[str, str]] = {"dropped": {}, "changed": {}}
    in_synthesis = "finetune" if run.selects_instructions else "pretrain"
    for stage, stage_split in (("filter", "pretrain"), ("synthesize", in_synthesis)):
        if stage in run.stages and stage_split == split:
            labels = dict(enumerate(_label_steps(experiment, stage), start=1))
            for row in read_jsonl(run.stages[stage] / "dropped.jsonl"):
                events[row["event"]][row["id"]] = labels.get(row["step"], f"{stage}{RECIPE}{row['operator']}")
    return events


def _label_steps(experiment: ExperimentResults, stage: str) -> list[str]:
    recipe = getattr(experiment.recipes, stage) or {}
    return list(label_operators(f"{stage} recipe", recipe.get("process") or []))


def list_changes(
    experiment: ExperimentResults, reference: ExperimentResults, rows: list[RowComparison]
) -> tuple[list[Change], int]:
    """Return the settings that differ with their effects, and the number of further ones.

    Operators whose settings are the same, but which treat other rows, follow. Settings that do not affect the trained
    weights are only counted.
    """
    groups: dict[str, list[SettingRow]] = {}
    hidden = 0
    for row in list_config_differences(experiment, reference):
        if row.same_weights:
            hidden += 1
        elif row.name.partition(".")[0] not in IN_RECIPES:
            groups.setdefault(_find_step(row.name), []).append(row)
    operators = [
        {label for stage in ("filter", "synthesize") for label in _label_steps(side, stage)}
        for side in (reference, experiment)
    ]
    changes = {
        step: Change(
            _describe_settings(step, settings, *operators),
            _describe_effect(step, rows) or (NO_ROW if rows and (RECIPE in step or step == FILE_STEP) else ""),
        )
        for step, settings in groups.items()
    }
    for step in dict.fromkeys(step for comparison in rows for step in comparison.causes if step not in groups):
        note = "rows that are unreadable or left out" if step == FILE_STEP else "settings not changed"
        changes[step] = Change([(_shorten(step), note)], _describe_effect(step, rows))

    def sort_key(step: str) -> tuple[int, bool]:
        return -sum(comparison.causes.get(step, Counter()).total() for comparison in rows), changes[
            step
        ].effect == NO_ROW

    shown = [changes[step] for step in sorted(changes, key=sort_key)]  # most rows first
    return shown[:SHOWN_CHANGES], hidden + sum(len(change.settings) for change in shown[SHOWN_CHANGES:])


def _find_step(setting: str) -> str:
    """Return the operator or stage that a setting belongs to; other settings are on their own."""
    stage, separator, rest = setting.partition(RECIPE)
    if separator:
        return f"{stage}{RECIPE}{rest.partition('.')[0]}"
    return FILE_STEP if setting.startswith(FILE_SETTINGS) else setting


def _shorten(name: str) -> str:
    return name.partition(RECIPE)[2] or name


def _describe_settings(
    step: str, rows: list[SettingRow], reference_operators: set[str], operators: set[str]
) -> list[tuple[str, str]]:
    if (step in operators) != (step in reference_operators):
        if step not in operators:
            return [(_shorten(step), "operator left out")]
        arguments = [f"{row.name.removeprefix(step)[1:]}: {row.value}" for row in rows if row.name != step]
        return [(_shorten(step), f"new operator{' with ' if arguments else ''}{', '.join(arguments)}")]
    return [
        (_shorten(row.name), f"{row.reference} → {row.value}") for row in rows if row.name != step or RECIPE not in step
    ]


def _describe_effect(step: str, rows: list[RowComparison]) -> str:
    effects = []
    for comparison in rows:
        for kind, count in comparison.causes.get(step, Counter()).items():
            unit = "captions" if (kind, comparison.unit) == ("changed", "pairs") else comparison.unit
            effects.append(f"{format_integer(count)} {unit.removesuffix('s') if count == 1 else unit} {kind}")
    return ", ".join(effects)


def build_strip(reference: ExperimentResults, experiment: ExperimentResults) -> Strip | None:
    """Return the first held-out question of each outcome: one side alone is right, or both answer alike.

    Without questions, captions are compared by their CLIPScore. None if the sides cannot be compared.
    """
    if describe_data_difference(reference, experiment):
        return None
    run, reference_run = _pair_runs(experiment, reference)
    runs = {reference.name: reference_run, experiment.name: run}
    outcomes, unit = list(_list_questions(reference.evaluation, runs)), "questions"
    titles = [f"Only {experiment.name} is right", f"Only {reference.name} is right", "Both are right, or both wrong"]
    if not outcomes and not find_obstacle("clip_score", reference, experiment):
        outcomes, unit = list(_list_captions(reference.evaluation, runs)), "captions"
        score = "higher CLIPScore"
        titles = [f"{experiment.name}: {score}", f"{reference.name}: {score}", "The same CLIPScore"]
    if not outcomes:
        return None
    numbers = Counter(gain for gain, *_ in outcomes)
    items: list[StripItem] = []
    for gain, title in zip((1, -1, 0), titles, strict=True):
        candidates = [item for item in outcomes if item[0] == gain]
        shown = {item.identifier for item in items}
        if candidates:  # from another image than the earlier ones, if there is one
            _, row, question, truth, answers = next(
                (item for item in candidates if item[1]["id"] not in shown), candidates[0]
            )
            image = load_thumbnail(reference.image_root, row["image"], STRIP_SIDE)
            if question and gain == 0:
                title = "Both are right" if answers[0].tone == "good" else "Both are wrong"
            items.append(StripItem(title, image, row["id"], question, truth, answers))
    counts = "; ".join(
        f"{title} ({format_integer(numbers[gain])})" for gain, title in zip((1, -1, 0), titles, strict=True)
    )
    return Strip(
        f"{format_integer(len(outcomes))} held-out {unit}, seed {run.seed}: {counts}. Shown is the "
        "first of each kind in the order of the dataset, on different images if possible.",
        items,
    )


Outcome = tuple[int, dict, str, str, list[StripAnswer]]  # gain, row, question, right answer, answers


def _list_questions(evaluation: list[dict], runs: dict[str, RunResults]) -> Iterator[Outcome]:
    """Yield the questions that both sides answered; the gain is 1, 0 or −1 right answers."""
    outputs = {name: read_outputs(run, "answers.jsonl", True) for name, run in runs.items()}
    for row in evaluation:
        for question in build_questions({name: rows.get(row["id"], []) for name, rows in outputs.items()}):
            if len(question.answers) == 2:
                answers = [
                    StripAnswer(answer.experiment, answer.text, *RIGHT[answer.right]) for answer in question.answers
                ]
                gain = question.answers[1].right - question.answers[0].right
                yield gain, row, question.text, question.truth, answers


def _list_captions(evaluation: list[dict], runs: dict[str, RunResults]) -> Iterator[Outcome]:
    """Yield the images that both sides captioned; the gain is the sign of the difference of their CLIPScores."""
    outputs = [read_outputs(run, "captions.jsonl", True) for run in runs.values()]
    scores = [_read_image_scores(run) for run in runs.values()]
    for row in evaluation:
        captions = [
            (caption["caption"].strip(), image_scores.get(caption["image_id"]))
            for rows, image_scores in zip(outputs, scores, strict=True)
            for caption in rows.get(row["id"], [])
            if caption["model"] == FINETUNED
        ]
        values = [value for _, value in captions if value is not None]
        if len(values) == 2:
            answers = [
                StripAnswer(name, caption, f"CLIPScore {format_score('clip_score', value)}", "")
                for name, (caption, value) in zip(runs, captions, strict=True)
            ]
            yield (values[1] > values[0]) - (values[1] < values[0]), row, "", row["captions"][0], answers


def _read_image_scores(run: RunResults) -> dict[str, float]:
    """Return the CLIPScore of the fine-tuned model's caption of each image."""
    scores = run.scores.groups.get(OWN_GROUP, {}).get("clip_score")
    return dict(zip(scores.ids, (scores.sums / scores.counts).tolist(), strict=True)) if scores else {}
