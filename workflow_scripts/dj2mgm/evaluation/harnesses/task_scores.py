"""Metrics of a task as sums by image, from which means, intervals and differences are computed as for other metrics.

A task aggregates all answers to one figure in its own way, such as an F1 or a mean of categories' means. Each image
gets the jackknife's pseudo-values (Tukey 1958). Their plain mean is the figure, and leaving out an image changes their
mean as much as it changes the figure. The pseudo-values of a plain mean are the values themselves.
"""

from collections.abc import Iterator, Sequence

from dj2mgm.evaluation.groups import Rows
from dj2mgm.evaluation.harnesses.lmms_tasks import Aggregate, LmmsTask, Values

MAX_UNITS = 200  # maximum number of units that are left out in turn; more images are grouped into units
Sums = dict[str, list[float]]  # by unit: sum and number of its values


def score_answers(task: LmmsTask, rows: Rows) -> Iterator[dict]:
    """Yield the rows of scores.jsonl from answers.jsonl; a metric is named <task>/<metric>."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["model"], row["images"]), []).append(row)
    for (model, images), answers in groups.items():
        answers.sort(key=lambda row: int(row["id"]))
        image_ids = [row["image"] for row in answers]
        by_unit: dict[str, dict[str, list[float]]] = {}
        for metric, values in task.compute_values([row["prediction"] for row in answers]).items():
            for unit, sums in _sum_values(values, image_ids, task.is_mean(metric)).items():
                by_unit.setdefault(unit, {})[f"{task.name}/{metric}"] = sums
        for unit in sorted(by_unit):
            yield {"model": model, "images": images, "id": unit, "values": by_unit[unit]}


def _sum_values(values: Values, image_ids: Sequence[str], is_mean: bool) -> Sums:
    images = [image_ids[question] for question in values.questions]
    if is_mean:
        sums: Sums = {image: [0.0, 0] for image in images}
        for image, value in zip(images, values.items, strict=True):
            sums[image][0] += float(value)
            sums[image][1] += 1
        return sums
    return compute_pseudo_values(values.aggregate, values.items, images)


def compute_pseudo_values(aggregate: Aggregate, items: list, images: Sequence[str]) -> Sums:
    """Return the sums of the pseudo-values of each image, or of each of `MAX_UNITS` groups of images.

    `aggregate` is the task's aggregation; `items`, its inputs, and `images` have one entry per question.
    """
    indices = {image: index for index, image in enumerate(dict.fromkeys(images))}
    is_grouped = len(indices) > MAX_UNITS
    units = [f"part {indices[image] % MAX_UNITS:03d}" if is_grouped else image for image in images]
    full_value, total = aggregate(items), len(items)
    counts = {unit: units.count(unit) for unit in dict.fromkeys(units)}
    if len(counts) == 1:
        return {unit: [full_value * count, count] for unit, count in counts.items()}
    sums = {}
    for unit, count in counts.items():
        rest = aggregate([item for item, item_unit in zip(items, units, strict=True) if item_unit != unit])
        sums[unit] = full_value * count - (rest - full_value) * (total - count)
    excess = (sum(sums.values()) - full_value * total) / total  # 0 for a plain mean
    return {unit: [sums[unit] - excess * count, count] for unit, count in counts.items()}
