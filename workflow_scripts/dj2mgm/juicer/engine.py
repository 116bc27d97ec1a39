"""The engine that runs a recipe over a dataset on disk, partition by partition; finished partitions stay finished.

The recipe is divided into passes. A pass runs a chain of operators (`chain`) on each partition, and ends if a decision
needs all rows (`decisions`). Data-Juicer's own deduplicators and selectors get the whole dataset, in their own pass. In
an analysis operators only measure: filters drop no rows, and deduplicators only record repeats.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import pyarrow as pa
from loguru import logger

from dj2mgm.cli.messages import Progress, note
from dj2mgm.juicer.built_operators import (
    Step,
    build_operators,
    check_ids,
    check_special_tokens,
    name_failing_row,
    naming_operator,
    restore_text,
    show_text,
)
from dj2mgm.juicer.chain import Chain
from dj2mgm.juicer.decisions import PartitionAccount, RowStream, SeenHashes, drop_near_duplicates, keep_selected
from dj2mgm.juicer.executors import RunChain, open_executor
from dj2mgm.juicer.operators.declarations import (
    get_batch_method,
    get_decision_method,
    get_declarations,
    has_model,
    merge_reports,
    needs_all_rows,
    take_report,
)
from dj2mgm.juicer.operators.deduplicators import NearDeduplicator
from dj2mgm.juicer.operators.selection import SelectionFilter, ShareLimits
from dj2mgm.juicer.partitions import (
    WHOLE_TEXT,
    count_rows,
    import_rows,
    iterate,
    iterate_column_values,
    iterate_tables,
    list_partitions,
    load_partitions,
    read_counts,
    read_recaption,
    write_partition,
    write_partitions,
)
from dj2mgm.juicer.patched_data_juicer import OP, Fields
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.model_files.clips import check_named_models
from dj2mgm.recipes.recipe_step import RecipeStep
from dj2mgm.records.recipe_summary import OperatorSummary
from dj2mgm.storage.files import replace_folder

if TYPE_CHECKING:
    from data_juicer.core.data import NestedDataset


class PassEnd(Enum):
    """The decision about rows at the end of a pass."""

    NONE = "each operator has decided row by row"
    MEASURED = "the last operator has measured all rows; the next pass begins with its decision"
    SELECTION = "the only operator selects rows"
    NEAR_DUPLICATES = "the only operator drops near-duplicates, given the signatures of all rows"
    REPEATS = "the last operator's hashes show, row by row in their order, which rows are repeats"
    ALL_ROWS = "the only operator gets the whole dataset"


@dataclass(frozen=True)
class Pass:
    """Consecutive steps that run on each partition, and the decision at their end."""

    steps: tuple[Step, ...]
    decision: PassEnd = PassEnd.NONE

    @property
    def finished_steps(self) -> tuple[Step, ...]:
        """Steps that have finished all rows at the end of the pass; a measured step still lacks its decision."""
        return self.steps[:-1] if self.decision is PassEnd.MEASURED else self.steps


def plan_passes(operators: Sequence[OP], only_measures: bool = False) -> list[Pass]:
    """Return the recipe's passes.

    The first operator with a model begins a pass, since models run in few processes and earlier operators in many. With
    `only_measures`, operators only measure, except one that drops rows with unreadable images.
    """
    passes: list[Pass] = []
    steps: list[Step] = []

    def end(decision: PassEnd = PassEnd.NONE) -> None:
        if steps:
            passes.append(Pass(tuple(steps), decision))
        steps.clear()

    for number, operator in enumerate(operators, start=1):
        step = Step(number, operator, only_measures and get_declarations(operator).unreadable_stat is None)
        if has_model(operator) and not any(has_model(earlier.operator) for earlier in steps):
            end()
        if isinstance(operator, NearDeduplicator):
            steps.append(step)
            end(PassEnd.MEASURED)
            steps.append(step)
            end(PassEnd.NEAR_DUPLICATES)
        elif get_declarations(operator).hash_key:
            steps.append(step)
            end(PassEnd.REPEATS)
        elif isinstance(operator, SelectionFilter):
            steps.append(replace(step, only_measures=True))
            end(PassEnd.MEASURED)
            steps.append(step)
            end(PassEnd.SELECTION)
        elif needs_all_rows(operator):
            end()
            steps.append(step)
            end(PassEnd.ALL_ROWS)
        else:
            if _has_share(operator) and not step.only_measures:
                steps.append(replace(step, only_measures=True))
                end(PassEnd.MEASURED)
            steps.append(step)
    end()
    return passes


def _has_share(operator: OP) -> bool:
    return isinstance(operator, ShareLimits) and bool(operator.shares)


class Engine:
    """Engine that runs one recipe on one dataset, in one folder.

    Attributes:
        folders: the dataset before the first pass, and after each pass.
        summaries: summaries of the operators that have processed all rows.
        counts: counts of each operator by its number (see `PartitionAccount`).
    """

    def __init__(
        self, steps: Sequence[RecipeStep], settings: RecipeSettings, working: Path, only_measures: bool = False
    ):
        """Build the operators and plan the passes.

        Args:
            steps: checked steps of the recipe with all arguments.
            settings: settings of the stage.
            working: folder for partitions.
            only_measures: whether filters and deduplicators only measure and count. Then only rows with unreadable
                images are dropped.
        """
        check_named_models([step.as_dict() for step in steps])
        self.operators = build_operators(steps, working)
        self.passes = plan_passes(self.operators, only_measures)
        self.settings = settings
        self.working = working
        self.folders: list[Path] = []
        self.summaries: list[OperatorSummary] = []
        self.counts: dict[int, dict] = {}

    def run(self, data: Path) -> None:
        """Run the passes in order, and stop after a pass that leaves no row."""
        for operator in self.operators:
            get_declarations(operator).check_ready()
        self.folders = [self.working / "pass-0"]
        if not self.folders[0].exists():
            import_rows(data, self.settings.image_root, self.folders[0], self.settings.columns)
        with open_executor(self.settings, self.working) as run:
            for number, current in enumerate(self.passes, start=1):
                target = self.working / f"pass-{number}"
                if current.decision is PassEnd.ALL_ROWS:
                    self._run_on_all_rows(current.steps[0], target)
                elif current.decision is PassEnd.SELECTION:
                    keep_selected(current.steps[0], self.folders[-1], target)
                elif current.decision is PassEnd.NEAR_DUPLICATES:
                    drop_near_duplicates(current.steps[0], self.folders[-1], target)
                else:
                    self._run_chain(current, target, run)
                self.folders.append(target)
                self._summarize(current)
                if not self.rows_out:
                    return

    @property
    def rows_in(self) -> int:
        return count_rows(self.folders[0])

    @property
    def rows_out(self) -> int:
        return count_rows(self.folders[-1])

    def _run_chain(self, current: Pass, target: Path, run: RunChain) -> None:
        """Run the pass on the partitions that are not yet in `target`."""
        source = self.folders[-1]
        for step in current.steps:
            if _has_share(step.operator) and not step.only_measures:  # the pass before has measured all rows
                step.operator.set_limits(json.loads(stats) for (stats,) in iterate_column_values(source, "stats"))
        chain = Chain(list(current.steps))
        pending = [partition for partition in list_partitions(source) if not (target / partition.name).exists()]
        if len(pending) < len(list_partitions(source)):
            note(f"continuing after {len(list_partitions(source)) - len(pending)} finished partitions")
        seen = _read_seen_hashes(target, current.steps[-1]) if current.decision is PassEnd.REPEATS else None
        progress = Progress("rows", sum(read_counts(partition)["rows"] for partition in pending))
        with closing(chain), closing(run(chain, pending)) as outcomes:
            rows = RowStream(outcomes)
            for partition in pending:
                count = read_counts(partition)["rows"]
                _write_outcomes(rows.take(count), seen, target / partition.name)
                if partition is not pending[-1]:
                    progress.add(count)
            next(outcomes, None)  # at the end of the outcomes Ray stops the actors of the pass

    def _run_on_all_rows(self, step: Step, target: Path) -> None:
        """Run an operator on the whole dataset, unless its rows are in `target` already."""
        if target.exists():
            return
        started = perf_counter()
        operator = step.operator
        dataset = load_partitions(self.folders[-1], self.working, partial(show_text, operator))
        earlier_statistics = dataset[0][Fields.stats] or {}
        with naming_operator(step.name):
            measured, kept_rows = _run_on_dataset(operator, dataset, step.only_measures)
        account = PartitionAccount()
        for event in _list_events(step, dataset, measured, kept_rows):
            account.add_event(event)
        new = [name for name in measured[0][Fields.stats] or {} if name not in earlier_statistics]
        counts = {"statistics": dict.fromkeys(new, len(measured)), "report": take_report(operator)}
        account.add_counts(step.number, counts | {"seconds": perf_counter() - started})
        with replace_folder(target) as folder:
            write_partitions(
                folder,
                iterate_tables(measured if step.only_measures else kept_rows, partial(restore_text, operator)),
                account.counts,
                account.trace,
            )

    def _summarize(self, current: Pass) -> None:
        """Summarize the operators that the last pass has finished, and log a line for each."""
        for partition in list_partitions(self.folders[-1]):
            for number, counts in read_counts(partition)["operators"].items():
                self.counts[int(number)] = merge_reports(self.counts.get(int(number), {}), counts)
        for step in current.finished_steps:
            rows_in = self.summaries[-1].rows_out if self.summaries else self.rows_in
            summary = self._summarize_step(step, rows_in)
            self.summaries.append(summary)
            logger.info(
                f"[{step.number}/{len(self.operators)}] {step.name}: {rows_in} rows in, {summary.rows_out} out, "
                f"{summary.dropped} dropped, {summary.changed} changed, {summary.seconds:.1f} s"
            )
            if not summary.rows_out:
                return

    def _summarize_step(self, step: Step, rows_in: int) -> OperatorSummary:
        counts, operator = self.counts.get(step.number, {}), get_declarations(step.operator)
        dropped = counts.get("dropped", 0)
        report = operator.finish_report(counts.get("report", {}))
        return OperatorSummary(
            step=step.number,
            operator=step.name,
            rows_in=rows_in,
            rows_out=rows_in - dropped,
            dropped=dropped,
            changed=counts.get("changed", 0),
            seconds=round(counts.get("seconds", 0.0), 3),
            reports={operator.report_key: report} if report else {},
        )


def _read_seen_hashes(folder: Path, step: Step) -> SeenHashes:
    """Return the hashes in the partitions that the pass has finished."""
    seen = SeenHashes(step, get_declarations(step.operator).hash_key)
    rows = iterate_column_values(folder, "id", "others")
    seen.first_ids.fill((json.loads(others)[seen.hash_key], identifier) for identifier, others in rows)
    return seen


def _write_outcomes(outcomes: Iterator[pa.Table], seen: SeenHashes | None, partition: Path) -> None:
    """Account for a partition's rows, and write the kept rows."""
    started = perf_counter()
    account = PartitionAccount()
    for table in outcomes:
        account.add_outcomes(table)
    if seen:
        account.drop_repeats(seen)
    account.share_time(perf_counter() - started)
    with replace_folder(partition) as folder:
        write_partition(folder, account.tables, account.counts, account.trace)


def _run_on_dataset(
    operator: OP, dataset: "NestedDataset", only_measures: bool
) -> tuple["NestedDataset", "NestedDataset"]:
    """Return the measured rows and the kept rows.

    A filter runs like in its own `run`, in two steps. With `only_measures`, the second step is left out.
    """
    if method := get_batch_method(operator):
        setattr(operator, method, name_failing_row(operator._name, getattr(operator, method)))
    decide = get_decision_method(operator)
    if decide is None:
        return dataset, operator.run(dataset)
    measured = operator.run(dataset, reduce=False)
    if only_measures:
        return measured, measured
    return measured, measured.filter(decide, batch_size=operator.batch_size, desc=f"{operator._name}_process")


def _list_events(
    step: Step, before: "NestedDataset", measured: "NestedDataset", kept_rows: "NestedDataset"
) -> Iterator[dict]:
    """Yield the trace of an operator on the whole dataset: dropped (or repeated) rows and changed texts."""
    columns = (
        {"id": [identifier for (identifier,) in iterate(kept_rows, "id")]} if "id" in kept_rows.column_names else {}
    )
    check_ids(step.name, {identifier for (identifier,) in iterate(before, "id")}, columns)
    remaining_ids, step_keys = set(columns["id"]), {"step": step.number, "operator": step.name}
    event_name = "repeated" if step.only_measures else "dropped"
    for identifier, stats, meta in iterate(measured, "id", Fields.stats, Fields.meta):
        if identifier not in remaining_ids:
            yield {"id": identifier, "event": event_name} | step_keys | {"stats": stats or {}} | read_recaption(meta)
    for identifier, text, shown in iterate(kept_rows, "id", WHOLE_TEXT, "text"):
        if (new_text := restore_text(step.operator, text, shown)) != text:
            check_special_tokens(step.name, *({"id": [identifier], "text": [value]} for value in (text, new_text)))
            yield {"id": identifier, "event": "changed", "text_before": text, "text_after": new_text} | step_keys
