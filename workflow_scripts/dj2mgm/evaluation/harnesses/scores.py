"""Metrics of a task as sums over images, from which means, intervals and differences are taken as everywhere else.

A task makes one figure of all answers in its own way: an F1, a mean of categories' means. Leaving out one image with
its questions changes the figure by so much, and the values that are given to the image are those whose plain mean is
the figure and changes by just as much (the jackknife's pseudo-values, Tukey 1958). For a plain mean they are the values
themselves.
"""

from collections.abc import Iterator, Sequence

from dj2mgm.evaluation.groups import Rows
from dj2mgm.evaluation.harnesses.lmms_tasks import Aggregate, LmmsTask, Values

UNITS = 200  # most that are left out one after another; of more images, several are left out together
MODEL = "finetune"
Sums = dict[str, list[float]]  # by unit: the sum of its values, and their number


def score_answers(task: LmmsTask, rows: Rows) -> Iterator[dict]:
    """Rows of scores.jsonl as groups.score_rows writes them; a metric is called <task>/<metric>.

    Args:
        rows: of answers.jsonl.
    """
    by_images: dict[str, Rows] = {}
    for row in rows:
        by_images.setdefault(row["images"], []).append(row)
    for images, answers in by_images.items():
        answers.sort(key=lambda row: int(row["id"]))
        shown = [row["image"] for row in answers]
        of_unit: dict[str, dict[str, list[float]]] = {}
        for metric, values in task.values([row["prediction"] for row in answers]).items():
            for unit, sums in _sums(values, shown, task.is_mean(metric)).items():
                of_unit.setdefault(unit, {})[f"{task.name}/{metric}"] = sums
        for unit in sorted(of_unit):
            yield {"model": MODEL, "images": images, "id": unit, "values": of_unit[unit]}


def _sums(values: Values, shown: Sequence[str], is_mean: bool) -> Sums:
    images = [shown[question] for question in values.questions]
    if is_mean:
        sums: Sums = {image: [0.0, 0] for image in images}
        for image, value in zip(images, values.items, strict=True):
            sums[image][0] += float(value)
            sums[image][1] += 1
        return sums
    return pseudo_values(values.aggregate, values.items, images)


def pseudo_values(aggregate: Aggregate, items: list, images: Sequence[str]) -> Sums:
    """
    Args:
        items: of each question, what `aggregate` makes one figure of.
        images: of each question.
    """
    places = {image: place for place, image in enumerate(dict.fromkeys(images))}
    together = len(places) > UNITS
    units = [f"part {places[image] % UNITS:03d}" if together else image for image in images]
    whole, total = aggregate(items), len(items)
    counts = {unit: units.count(unit) for unit in dict.fromkeys(units)}
    if len(counts) == 1:
        return {unit: [whole * count, count] for unit, count in counts.items()}
    sums = {}
    for unit, count in counts.items():
        rest = aggregate([item for item, of in zip(items, units, strict=True) if of != unit])
        sums[unit] = whole * count - (rest - whole) * (total - count)
    excess = (sum(sums.values()) - whole * total) / total  # of a figure that is no plain mean
    return {unit: [sums[unit] - excess * count, count] for unit, count in counts.items()}
