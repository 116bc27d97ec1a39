"""The engine that runs a recipe over a dataset on disk, partition by partition; finished partitions stay finished.

The recipe is cut into passes. A pass takes each partition through a chain of operators (`chain`), and ends where a
decision needs all rows. Data-Juicer's own deduplicators and its selectors get the whole dataset, in a pass of their
own. Where operators only measure, as in an analysis, filters drop no rows and deduplicators only note repeats.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import perf_counter

import pyarrow as pa
from loguru import logger

from dj2mgm.config.clips import check_named_models
from dj2mgm.files import replace_folder
from dj2mgm.juicer.chain import Chain, ChainStep
from dj2mgm.juicer.copies import drop_copies
from dj2mgm.juicer.data_juicer import OP, Fields, NestedDataset
from dj2mgm.juicer.executors import Run, open_executor
from dj2mgm.juicer.ledger import Ledger, Repeats, RowStream
from dj2mgm.juicer.operators import declarations
from dj2mgm.juicer.operators.declarations import merge_reports
from dj2mgm.juicer.operators.keep_fraction import set_limits
from dj2mgm.juicer.partitions import (
    column_values,
    count_rows,
    import_rows,
    iterate,
    iterate_tables,
    list_partitions,
    load_dataset,
    read_counts,
    read_recaption,
    write_partition,
    write_partitions,
)
from dj2mgm.juicer.recipe import build_operators, check_ids, check_special_tokens, operator_named, row_named
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.selected import keep_selected
from dj2mgm.messages import Progress, note


class Ending(Enum):
    """What a pass ends with."""

    NONE = "each operator has decided row by row"
    MEASURED = (
        "the last operator has only measured; the next pass begins with it, and decides by what it knows of all rows"
    )
    SELECTION = "the only operator says which rows are kept"
    COPIES = "the only operator drops the copies that all rows' signatures tell"
    REPEATS = "the last operator's hashes tell, row by row in their order, which rows are repeats"
    ALL_ROWS = "the only operator gets the whole dataset"


@dataclass(frozen=True)
class Pass:
    steps: tuple[ChainStep, ...]
    ending: Ending = Ending.NONE

    @property
    def decided(self) -> tuple[ChainStep, ...]:
        """The steps that have seen all rows and are done with them."""
        return self.steps[:-1] if self.ending is Ending.MEASURED else self.steps


def passes_of(process: list[dict], operators: list[OP], measures: bool = False) -> list[Pass]:
    """The recipe's passes. A first model begins a pass: models run in few processes, what comes before them in many.

    Args:
        measures: operators only measure, except one that drops rows with unreadable images.
    """
    passes: list[Pass] = []
    steps: list[ChainStep] = []

    def end(ending: Ending = Ending.NONE) -> None:
        if steps:
            passes.append(Pass(tuple(steps), ending))
        steps.clear()

    for number, (spec, operator) in enumerate(zip(process, operators, strict=True), start=1):
        step = ChainStep(number, spec, measures and declarations.unreadable_stat(operator) is None)
        in_pass = [operators[earlier.number - 1] for earlier in steps]
        if declarations.holds_model(operator) and not any(map(declarations.holds_model, in_pass)):
            end()
        if declarations.finds_copies(operator):
            steps.append(step)
            end(Ending.MEASURED)
            steps.append(step)
            end(Ending.COPIES)
        elif declarations.hash_key(operator):
            steps.append(step)
            end(Ending.REPEATS)
        elif declarations.needs_all_rows(operator):
            end()
            steps.append(step)
            end(Ending.ALL_ROWS)
        elif declarations.selects(operator):
            steps.append(ChainStep(number, spec, measures=True))
            end(Ending.MEASURED)
            steps.append(step)
            end(Ending.SELECTION)
        else:
            if declarations.shares(operator) and not step.measures:
                steps.append(ChainStep(number, spec, measures=True))
                end(Ending.MEASURED)
            steps.append(step)
    end()
    return passes


class Engine:
    """Runs one recipe on one dataset, in one folder.

    Attributes:
        folders: the dataset before the first pass, and after each.
        summaries: of the operators that have seen all rows.
        counts: of each operator, by its number; see `Ledger`.
    """

    def __init__(self, process: list[dict], settings: RecipeSettings, working: Path, measures: bool = False):
        """
        Args:
            process: complete and checked.
            measures: filters and deduplicators only measure and count; only rows with unreadable images are dropped.

        Raises:
            InputError: names the operator that cannot be built and why, or the fault of a model's folder.
        """
        check_named_models(process)
        self.operators = build_operators(process, working)
        self.passes = passes_of(process, self.operators, measures)
        self.settings = settings
        self.working = working
        self.folders: list[Path] = []
        self.summaries: list[dict] = []
        self.counts: dict[int, dict] = {}

    def run(self, data: Path) -> None:
        """All passes, or as many as leave a row.

        Raises:
            InputError: a bad row, or an operator that fails.
        """
        for operator in self.operators:
            declarations.check_ready(operator)
        self.folders = [self.working / "pass-0"]
        if not self.folders[0].exists():
            import_rows(data, self.settings.image_root, self.folders[0])
        with open_executor(self.settings, self.working) as run:
            for number, current in enumerate(self.passes, start=1):
                target = self.working / f"pass-{number}"
                if current.ending is Ending.ALL_ROWS:
                    self._run_on_all_rows(current.steps[0], target)
                elif current.ending is Ending.SELECTION:
                    [step] = current.steps
                    keep_selected(step, self.operator_of(step), self.folders[-1], target)
                elif current.ending is Ending.COPIES:
                    [step] = current.steps
                    drop_copies(step, self.operator_of(step), self.folders[-1], target)
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

    def operator_of(self, step: ChainStep) -> OP:
        return self.operators[step.number - 1]

    def _run_chain(self, current: Pass, target: Path, run: Run) -> None:
        """Run the pass on the partitions that are not yet in `target`."""
        source = self.folders[-1]
        chain = Chain([self._with_limit(step, source) for step in current.steps], self.working)
        waiting = [partition for partition in list_partitions(source) if not (target / partition.name).exists()]
        if len(waiting) < len(list_partitions(source)):
            note(f"going on after {len(list_partitions(source)) - len(waiting)} partitions that were done before")
        repeats = self._repeats_in(target, current.steps[-1]) if current.ending is Ending.REPEATS else None
        progress = Progress("rows", sum(read_counts(partition)["rows"] for partition in waiting))
        with closing(chain), closing(run(chain, waiting)) as outcomes:
            rows = RowStream(outcomes)
            for partition in waiting:
                count = read_counts(partition)["rows"]
                _write_outcomes(rows.take(count), repeats, target / partition.name)
                if partition is not waiting[-1]:
                    progress.add(count)
            next(outcomes, None)  # there is none, and at the end of its outcomes Ray lets go of a pass's actors

    def _repeats_in(self, folder: Path, step: ChainStep) -> Repeats:
        """What a deduplicator knows of the partitions that the pass has finished."""
        repeats = Repeats(step, declarations.hash_key(self.operator_of(step)))
        rows = column_values(folder, "id", "others")
        repeats.first.fill((json.loads(others)[repeats.hash_key], identifier) for identifier, others in rows)
        return repeats

    def _with_limit(self, step: ChainStep, source: Path) -> ChainStep:
        """The step, with limits in place of its shares: all rows of `source` have scores by now."""
        operator = self.operator_of(step)
        if step.measures or not declarations.shares(operator):
            return step
        limits = set_limits(operator, (json.loads(stats) for (stats,) in column_values(source, "stats")))
        return ChainStep(step.number, {step.name: step.spec[step.name] | limits})

    def _run_on_all_rows(self, step: ChainStep, target: Path) -> None:
        """Hand the whole dataset to an operator, unless its rows are in `target` already."""
        if target.exists():
            return
        started = perf_counter()
        operator, dataset = self.operator_of(step), load_dataset(self.folders[-1], self.working)
        known = dataset[0][Fields.stats] or {}
        with operator_named(step.name):
            measured, kept = _run_on_dataset(operator, dataset, step.measures)
        ledger = Ledger()
        for event in _events(step, dataset, measured, kept):
            ledger.add_event(event)
        new = [name for name in measured[0][Fields.stats] or {} if name not in known]
        counts = {"statistics": dict.fromkeys(new, len(measured)), "report": declarations.take_report(operator)}
        ledger.add_counts(step.number, counts | {"seconds": perf_counter() - started})
        with replace_folder(target) as folder:
            write_partitions(folder, iterate_tables(measured if step.measures else kept), ledger.counts, ledger.trace)

    def _summarize(self, current: Pass) -> None:
        """Summarize the operators that the last pass has finished, with a line for each in the log."""
        for partition in list_partitions(self.folders[-1]):
            for number, counts in read_counts(partition)["operators"].items():
                self.counts[int(number)] = merge_reports(self.counts.get(int(number), {}), counts)
        for step in current.decided:
            rows_in = self.summaries[-1]["rows_out"] if self.summaries else self.rows_in
            summary = self._summary_of(step, rows_in)
            self.summaries.append(summary)
            logger.info(
                f"[{step.number}/{len(self.operators)}] {step.name}: {rows_in} rows in, {summary['rows_out']} out, "
                f"{summary['dropped']} dropped, {summary['changed']} changed, {summary['seconds']:.1f} s"
            )
            if not summary["rows_out"]:
                return

    def _summary_of(self, step: ChainStep, rows_in: int) -> dict:
        """What an operator did to all rows, as in summary.json."""
        counts, operator = self.counts.get(step.number, {}), self.operator_of(step)
        dropped = counts.get("dropped", 0)
        summary = {
            "step": step.number,
            "operator": step.name,
            "rows_in": rows_in,
            "rows_out": rows_in - dropped,
            "dropped": dropped,
            "changed": counts.get("changed", 0),
            "seconds": round(counts.get("seconds", 0.0), 3),
        }
        report = declarations.judge_report(operator, counts.get("report", {}))
        return summary | ({declarations.report_key(operator): report} if report else {})


def _write_outcomes(outcomes: Iterator[pa.Table], repeats: Repeats | None, partition: Path) -> None:
    """Account for a partition's rows, and write those that are kept."""
    started = perf_counter()
    ledger = Ledger()
    for table in outcomes:
        ledger.add_outcomes(table)
    if repeats:
        ledger.add_repeats(repeats)
    ledger.share_time(perf_counter() - started)
    with replace_folder(partition) as folder:
        write_partition(folder, ledger.kept, ledger.counts, ledger.trace)


def _run_on_dataset(operator: OP, dataset: NestedDataset, measures: bool) -> tuple[NestedDataset, NestedDataset]:
    """(rows with what the operator measured, rows that it keeps). A filter runs as in its own `run`, in two moves, and
    only the first of them where it only `measures`."""
    if method := declarations.batch_method(operator):
        setattr(operator, method, row_named(operator._name, getattr(operator, method)))
    decide = declarations.decision_of(operator)
    if decide is None:
        return dataset, operator.run(dataset)
    measured = operator.run(dataset, reduce=False)
    if measures:
        return measured, measured
    return measured, measured.filter(decide, batch_size=operator.batch_size, desc=f"{operator._name}_process")


def _events(step: ChainStep, before: NestedDataset, measured: NestedDataset, kept: NestedDataset) -> Iterator[dict]:
    """The trace of an operator that got the whole dataset: rows that it dropped, or would drop, and texts it changed.

    Raises:
        InputError: the operator added or repeated rows, or removed their ids.
    """
    columns = {"id": [identifier for (identifier,) in iterate(kept, "id")]} if "id" in kept.column_names else {}
    check_ids(step.name, {identifier for (identifier,) in iterate(before, "id")}, columns)
    remaining, place = set(columns["id"]), {"step": step.number, "operator": step.name}
    kind = "repeated" if step.measures else "dropped"
    for identifier, stats, meta in iterate(measured, "id", Fields.stats, Fields.meta):
        if identifier not in remaining:
            yield {"id": identifier, "event": kind} | place | {"stats": stats or {}} | read_recaption(meta)
    texts = dict(iterate(before, "id", "text"))
    for identifier, text in iterate(kept, "id", "text"):
        if text != texts[identifier]:
            check_special_tokens(
                step.name, *({"id": [identifier], "text": [seen]} for seen in (texts[identifier], text))
            )
            change = {"id": identifier, "event": "changed", "text_before": texts[identifier], "text_after": text}
            yield change | place
