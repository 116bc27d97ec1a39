"""A recipe's passes over a dataset on disk, partition by partition; what is done stays done."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter

import pyarrow as pa
from loguru import logger

from disk_map import DiskMap
from files import replace_folder, sha256_of
from juicer import library
from juicer.chain import Chain, Link
from juicer.dataset import dataset_of, tables_of
from juicer.executors import Run, executor_of
from juicer.ledger import Ledger, Rows, merge
from juicer.library import OP
from juicer.operators.image_text_deduplicator import HASH
from juicer.operators.recaptioning import LowSimilarityRecaptionMapper
from juicer.operators.recaptioning.captioner import weight_files
from juicer.operators.recaptioning.progress import Progress
from juicer.operators.recaptioning.report import judge_captioner
from juicer.operators.similarity_limit import limit_of_fraction
from juicer.partitions import column_values, counts_of, import_rows, partitions_of, write_partition, write_partitions
from juicer.passes import Pass, has_fraction, passes_of, with_limit
from juicer.recipe import operator_settings
from juicer.settings import StageSettings
from juicer.steps import run_step
from settings.code import modules_of
from settings.recipe_shape import files_named


def fingerprint(process: list[dict], settings: StageSettings, data: Path) -> str:
    """What a stage's work so far depends on: data, recipe, models, and the code of this module and of those that it
    uses, operators among them. The executor changes nothing."""
    models = [sha256_of(file) for folder in _folders(process) for file in weight_files(folder)]
    models += [sha256_of(file) for file in files_named(process)]
    code = sha256_of(*modules_of(Path(__file__)))
    parts = [process, str(settings.image_root), sha256_of(data), models, code, library.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _folders(value: object) -> Iterator[Path]:
    """Folders of models that a recipe's arguments name. That of the images is none, and may have a text for each."""
    if isinstance(value, str) and os.path.isdir(value):  # an empty text is none, while Path("") is this folder
        yield Path(value)
    elif isinstance(value, dict):
        yield from _folders([item for key, item in value.items() if key != "image_root"])
    elif isinstance(value, list):
        for item in value:
            yield from _folders(item)


class Work:
    """The work of one stage in one folder.

    Attributes:
        folders: the dataset before the first pass, and after each.
        steps: summaries of the operators that have seen all rows.
    """

    def __init__(self, process: list[dict], operators: list[OP], settings: StageSettings, working: Path):
        self.process = process
        self.operators = operators
        self.settings = settings
        self.working = working
        self.folders: list[Path] = []
        self.steps: list[dict] = []
        self.did: dict[int, dict] = {}  # by the operator's number

    def run(self, data: Path) -> None:
        """All passes, or as many as leave a row.

        Raises:
            InputError: a bad row, or an operator that fails.
        """
        self.folders = [self.working / "pass-0"]
        if not self.folders[0].exists():
            import_rows(data, self.settings.image_root, self.folders[0])
        with executor_of(self.settings, self.working) as run:
            for number, one in enumerate(passes_of(self.process, self.operators), start=1):
                target = self.working / f"pass-{number}"
                if one.whole:
                    self._run_whole(one.whole, target)
                else:
                    self._run_chain(one, target, run)
                self.folders.append(target)
                self._summarize(one)
                if not self.rows_left:
                    return

    @property
    def rows_in(self) -> int:
        return _rows(self.folders[0])

    @property
    def rows_left(self) -> int:
        return _rows(self.folders[-1])

    def _run_chain(self, one: Pass, target: Path, run: Run) -> None:
        """Those partitions that are not yet in `target`."""
        source = self.folders[-1]
        links = [self._decided(link, source) for link in one.links]
        chain = Chain(links, operator_settings(self.settings.processes, self.working))
        waiting = [partition for partition in partitions_of(source) if not (target / partition.name).exists()]
        if len(waiting) < len(partitions_of(source)):
            logger.info(f"going on after {len(partitions_of(source)) - len(waiting)} partitions that were done before")
        seen = _hashes_in(target) if one.deduplicates else None
        progress = Progress("rows", sum(counts_of(partition)["rows"] for partition in waiting))
        with closing(chain), closing(run(chain, waiting)) as outcomes:
            rows = Rows(outcomes)
            for partition in waiting:
                count = counts_of(partition)["rows"]
                _keep(rows.take(count), links[-1], seen, target / partition.name)
                if partition is not waiting[-1]:
                    progress.add(count)
            next(outcomes, None)  # there is none, and at the end of its outcomes Ray lets go of a pass's actors

    def _decided(self, link: Link, source: Path) -> Link:
        """The link, with a limit in place of its fraction: all rows of `source` have scores by now."""
        operator = self.operators[link.number - 1]
        if link.measures or not has_fraction(operator):
            return link
        stats = (json.loads(stats) for (stats,) in column_values(source, "stats"))
        limit = limit_of_fraction((score for row in stats for score in operator.scores_of(row)), operator.keep_fraction)
        setattr(operator, operator.LIMIT, limit)  # for who asks later what it was
        return with_limit(link, operator, limit)

    def _run_whole(self, number: int, target: Path) -> None:
        """An operator that wants the whole dataset gets it, as Data-Juicer does it."""
        if target.exists():
            return
        kept, step = run_step(number, self.operators[number - 1], dataset_of(self.folders[-1], self.working))
        ledger = Ledger()
        for event in step.trace:
            ledger.note(event)
        ledger.operators[number] = ledger.operators.get(number, {}) | {"seconds": step.seconds}
        with replace_folder(target) as folder:
            write_partitions(folder, tables_of(kept), ledger.operators, ledger.trace)

    def _summarize(self, one: Pass) -> None:
        """The summaries of the operators that the last pass has finished, and a line for each in the log."""
        for partition in partitions_of(self.folders[-1]):
            for number, did in counts_of(partition)["operators"].items():
                self.did[int(number)] = merge(self.did.get(int(number), {}), did)
        finished = [link.number for link in one.links if not link.measures or one.deduplicates]
        for number in [one.whole] if one.whole else finished:
            did, operator = self.did.get(number, {}), self.operators[number - 1]
            rows_in = self.steps[-1]["rows_out"] if self.steps else self.rows_in
            step = {
                "step": number,
                "operator": operator._name,
                "rows_in": rows_in,
                "rows_out": rows_in - did.get("dropped", 0),
                "dropped": did.get("dropped", 0),
                "changed": did.get("changed", 0),
                "seconds": round(did.get("seconds", 0.0), 3),
            }
            step |= {key: did[key] for key in ("broken_images", "recaption") if did.get(key)}
            if isinstance(operator, LowSimilarityRecaptionMapper):
                judge_captioner(operator.captioner.name, step["recaption"], operator.max_caption_length)
            self.steps.append(step)
            logger.info(
                f"[{number}/{len(self.operators)}] {operator._name}: {rows_in} rows in, {step['rows_out']} out, "
                f"{step['dropped']} dropped, {step['changed']} changed, {step['seconds']:.1f} s"
            )
            if not step["rows_out"]:
                return


def _keep(outcomes: Iterator[pa.Table], last: Link, seen: DiskMap | None, partition: Path) -> None:
    """Account for a partition's rows, and write those that are left.

    Args:
        last: the pass's last link.
        seen: for a pass that deduplicates: hashes of all rows before these.
    """
    started = perf_counter()
    ledger = Ledger()
    for table in outcomes:
        ledger.add(table)
    if seen is not None:
        ledger.drop_repeats(last, seen)
    ledger.share_time(perf_counter() - started)
    with replace_folder(partition) as folder:
        write_partition(folder, ledger.kept, ledger.operators, ledger.trace)


def _rows(folder: Path) -> int:
    return sum(counts_of(partition)["rows"] for partition in partitions_of(folder))


def _hashes_in(folder: Path) -> DiskMap:
    """Hashes of the rows that are left in the partitions of a pass so far, with their ids."""
    seen = DiskMap()
    rows = column_values(folder, "id", "others")
    seen.fill((json.loads(others)[HASH], identifier) for identifier, others in rows)
    return seen
