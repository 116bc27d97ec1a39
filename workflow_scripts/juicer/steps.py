"""Running one operator on a dataset, so that every row it drops or edits, or fails on, is known by its id."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

from juicer.dataset import iterate, recaption_of
from juicer.failures import check_ids, operator_named, row_named
from juicer.library import OP, Deduplicator, Fields, Filter, Mapper, NestedDataset, setup_mp
from juicer.operators.image_integrity_filter import STAT as IMAGE_INTEGRITY
from juicer.operators.image_integrity_filter import ImageIntegrityFilter


@dataclass
class Step:
    """What one operator did. `trace` holds one row for each row that it dropped or whose text it changed."""

    number: int
    operator: str
    rows_in: int
    rows_out: int
    seconds: float = 0.0
    trace: list[dict] = field(default_factory=list)
    broken_images: Counter = field(default_factory=Counter)

    @property
    def dropped(self) -> int:
        return self.rows_in - self.rows_out

    @property
    def changed(self) -> int:
        return sum(row["event"] == "changed" for row in self.trace)


def run_step(number: int, operator: OP, dataset: NestedDataset) -> tuple[NestedDataset, Step]:
    """Run the operator; return the rows it left and the record of what it did.

    Raises:
        InputError: the operator failed (names the row where it can), lacks a package, or added or repeated rows.
    """
    started = perf_counter()
    name = operator._name
    with operator_named(name):
        scored, kept = _apply(operator, dataset)
    step = Step(number, name, rows_in=len(dataset), rows_out=len(kept))
    left = _ids_left(name, scored, kept)
    for identifier, stats, meta in iterate(scored, "id", Fields.stats, Fields.meta):
        if identifier not in left:
            row = {"id": identifier, "event": "dropped", "step": number, "operator": name, "stats": stats or {}}
            step.trace.append(row | recaption_of(meta))
    if isinstance(operator, ImageIntegrityFilter):
        step.broken_images.update(row["stats"][IMAGE_INTEGRITY] for row in step.trace)
    if isinstance(operator, Mapper):
        step.trace += [row | {"step": number, "operator": name} for row in _changes(dataset, kept)]
    step.seconds = perf_counter() - started
    return kept, step


def _apply(operator: OP, dataset: NestedDataset) -> tuple[NestedDataset, NestedDataset]:
    """(rows before dropping, with the operator's stats; rows kept). A filter runs as in its own `run`, in two moves."""
    setup_mp()
    if operator.num_proc:
        operator.num_proc = min(operator.num_proc, len(dataset))
    _name_failing_row(operator)
    if not isinstance(operator, Filter):
        return dataset, operator.run(dataset)
    scored = operator.run(dataset, reduce=False)
    kept = scored.filter(
        operator.process,
        num_proc=operator.runtime_np(),
        batch_size=operator.batch_size,
        desc=f"{operator._name}_process",
    )
    return scored, kept


def _name_failing_row(operator: OP) -> None:
    """Wrap the operator's work on a batch: when it raises, find the row that it raises on."""
    attribute = next(
        (
            attribute
            for kind, attribute in ((Filter, "compute_stats"), (Mapper, "process"), (Deduplicator, "compute_hash"))
            if isinstance(operator, kind)
        ),
        None,
    )
    if attribute is None:
        return
    setattr(operator, attribute, row_named(operator._name, getattr(operator, attribute)))


def _ids_left(name: str, before: NestedDataset, after: NestedDataset) -> set[str]:
    left = [identifier for (identifier,) in iterate(after, "id")] if "id" in after.column_names else None
    check_ids(name, {identifier for (identifier,) in iterate(before, "id")}, {} if left is None else {"id": left})
    return set(left)


def _changes(before: NestedDataset, after: NestedDataset) -> Iterator[dict]:
    texts = dict(iterate(before, "id", "text"))
    for identifier, text in iterate(after, "id", "text"):
        if text != texts[identifier]:
            yield {"id": identifier, "event": "changed", "text_before": texts[identifier], "text_after": text}
