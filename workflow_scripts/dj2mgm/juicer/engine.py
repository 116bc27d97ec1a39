"""The engine that runs a recipe over a dataset on disk, partition by partition; finished partitions stay finished.

Operators work in two phases: they measure batches of rows, and decide which rows are kept. The recipe is divided into
passes. A pass runs a chain of operators on each partition (chain.py), or lets one operator decide about all rows, once
the pass before has measured them (decisions.py). In an analysis operators only measure: filters drop no rows, and
deduplicators only record repeats.

A chain runs in processes of this machine, or in Ray on this machine or a cluster. Both give the same outcomes in the
same order, and are at most a few batches ahead of the caller.
"""

import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import pyarrow as pa
from data_juicer.ops.base_op import Deduplicator, Filter, Mapper, Selector
from loguru import logger

from dj2mgm.cli.messages import Progress, note
from dj2mgm.errors import InputError
from dj2mgm.juicer.chain import Chain, Step
from dj2mgm.juicer.decisions import PartitionAccount, RowStream, decide_about_all_rows
from dj2mgm.juicer.operators.declarations import (
    ShareLimits,
    decides_last,
    get_batch_method,
    get_declarations,
    has_model,
    merge_reports,
)
from dj2mgm.juicer.partitions import (
    count_rows,
    import_rows,
    iterate_batches,
    iterate_column_values,
    list_batches,
    list_partitions,
    read_batch,
    read_counts,
)
from dj2mgm.juicer.patched_data_juicer import (
    OP,
    OPERATORS,
    MissingPackageError,
    check_arguments,
    load_ray_dataset_class,
    load_step,
    make_package_error,
)
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.model_files.missing_models import check_named_models
from dj2mgm.recipes.recipe_parsing import RecipeStep, find_nearest_name, make_row_merge_error
from dj2mgm.records import OperatorSummary
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.storage.streaming import map_in_order

OBJECT_STORE = 256 * 2**20  # bytes; for batches of some hundred KB each
RunChain = Callable[[Chain, list[Path]], Iterator[pa.Table]]  # outcomes of the partitions' rows, in their order
# the engine shares rows among processes, and an operator that fails stops the stage
IN_THIS_PROCESS = {"skip_op_error": False, "auto_op_parallelism": False, "num_proc": 1}


@contextmanager
def open_executor(settings: RecipeSettings, working: Path) -> Iterator[RunChain]:
    """Open the executor of the recipe; Ray, if operators share several GPUs."""
    if settings.on_ray:
        with open_ray_executor(settings, working) as run:
            yield run
    else:
        yield lambda chain, partitions: run_locally(chain, partitions, settings.processes)


def run_locally(chain: Chain, partitions: list[Path], processes: int) -> Iterator[pa.Table]:
    tables = (table for partition in partitions for table in iterate_batches(partition))
    return map_in_order(chain.process, tables, 1 if chain.unforkable else processes)


@contextmanager
def open_ray_executor(settings: RecipeSettings, working: Path) -> Iterator[RunChain]:
    """Open Data-Juicer's Ray executor.

    It uses the cluster at `ray_address`, or starts a cluster on this machine with as many cores as the larger of
    `processes` and `gpus`. The nodes of a cluster need this project, its environment and the data at the same paths.
    """
    try:
        import ray.data
    except ModuleNotFoundError:
        raise make_package_error("of the executor ray", "ray") from None
    for name in ("ray", "ray.data"):  # after the import, which sets other levels
        logging.getLogger(name).setLevel(logging.ERROR)
    environment = {"PYTHONPATH": str(SCRIPTS), "RAY_JOB": "1"}  # Data-Juicer detects Ray by RAY_JOB
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
    options = {} if settings.ray_address else _prepare_own_cluster(max(settings.processes, settings.gpus), working)
    try:
        _check_reachable(settings.ray_address or "")
        ray.init(
            address=settings.ray_address or "local",
            runtime_env={"env_vars": environment},
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"recipe.ray_address: no Ray cluster at {settings.ray_address!r} ({error}). Start one (ray start --head), "
            "or omit the key to start one on this machine"
        ) from None
    try:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        yield _run_on_ray
    finally:
        ray.shutdown()
        if options:
            shutil.rmtree(options["_temp_dir"], ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError if nothing listens at host:port; Ray itself would try for 15 minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=10).close()


def _prepare_own_cluster(cores: int, working: Path) -> dict:
    # Ray's agents outlive a killed stage for this time and keep its log open
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    return {
        "num_cpus": cores,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
        "object_spilling_directory": str(working),
        "_temp_dir": tempfile.mkdtemp(prefix="ray-"),  # sockets, whose paths must be short
    }


def _run_on_ray(chain: Chain, partitions: list[Path]) -> Iterator[pa.Table]:
    """Yield a table of outcomes per batch; if a model needs GPUs, each actor takes a core and a GPU."""
    import ray

    if chain.in_one_process:
        names = ", ".join(step.name for step in chain.steps)
        note(f"{names}: runs in this process and not on Ray, since one process must count the requests to a server")
        yield from run_locally(chain, partitions, 1)
        return
    batch_locations = [location for partition in partitions for location in list_batches(partition)]
    if not batch_locations:
        return
    read_options = {}
    if chain.use_ray_actor():
        resources = ray.cluster_resources()
        chain.num_proc, chain.num_gpus = int(resources["CPU"]), None  # an actor takes a core
        if chain.use_cuda():  # and a GPU
            chain.num_proc, chain.num_gpus = min(chain.num_proc, int(resources["GPU"])), 1
        read_options["num_cpus"] = 0  # the actors may hold all cores
    items = [{"path": path, "number": number} for path, number in batch_locations]
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _read_batch, batch_size=1, **read_options
    )
    dataset = load_ray_dataset_class()(rows, auto_op_parallelism=False)
    yield from dataset.process([chain]).data.iter_batches(batch_size=None, batch_format="pyarrow")


def _read_batch(locations: dict) -> pa.Table:
    [path], [number] = locations["path"], locations["number"]
    return read_batch(str(path), int(number))


def check_installed(steps: Sequence[RecipeStep]) -> None:
    """Check that the installed Data-Juicer has the operators and accepts their arguments.

    `parse_recipe` has checked before which operators and values a recipe may use.
    """
    for step in (step for top in steps for step in top.list_with_captioner()):
        if step.name not in OPERATORS.modules:
            nearest_name = find_nearest_name(step.name, OPERATORS.modules)
            raise InputError(
                f"{step.location}: unknown operator {step.name!r}; the nearest known one is {nearest_name!r}"
            )
        if problems := check_arguments(step.name, step.arguments):
            raise InputError(f"{step.location}: {'; '.join(problems)}; see Data-Juicer's page of the operator")
        if not issubclass(OPERATORS.modules[step.name], Filter | Mapper | Deduplicator | Selector):
            raise make_row_merge_error(step.location, step.name)


def build_operators(steps: Sequence[RecipeStep], working: Path) -> list[OP]:
    """Return a recipe's operators; refuse two that would send the same requests."""
    operators = [_build_operator(step, working) for step in steps]
    spenders: dict[str, int] = {}
    for number, operator in enumerate(operators, start=1):
        budget = get_declarations(operator).budget
        if budget and (first := spenders.setdefault(budget, number)) != number:
            raise InputError(
                f"recipe, steps {first} and {number}: {operator._name} would send the same requests to the same server "
                "twice. Remove one of the steps"
            )
    return operators


def _build_operator(step: RecipeStep, working: Path) -> OP:
    try:
        operator = load_step(step.name, step.arguments, IN_THIS_PROCESS | {"work_dir": str(working)})
    except MissingPackageError as error:
        raise make_package_error(step.name, error.package) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"recipe: operator {step.name} cannot be built: {type(error).__name__}: {error}") from error
    operator.num_proc = None  # with 1, datasets would still start a process
    return operator


@dataclass(frozen=True)
class Pass:
    """Consecutive steps that run on each partition, or a single step that decides about all rows."""

    steps: tuple[Step, ...]
    is_decision: bool = False


def plan_passes(operators: Sequence[OP], only_measures: bool = False) -> list[Pass]:
    """Return the recipe's passes.

    The first operator with a model begins a pass, since models run in few processes and earlier operators in many. With
    `only_measures`, operators only measure, except one that drops rows with unreadable images.
    """
    passes: list[Pass] = []
    steps: list[Step] = []

    def end() -> None:
        if steps:
            passes.append(Pass(tuple(steps)))
        steps.clear()

    for number, operator in enumerate(operators, start=1):
        step = Step(number, operator, only_measures and get_declarations(operator).unreadable_stat is None)
        if has_model(operator) and not any(has_model(earlier.operator) for earlier in steps):
            end()
        if decides_last(operator) or _has_share(step):
            if get_batch_method(operator, only_measures=True):
                steps.append(replace(step, only_measures=True, is_first_phase=True))
            end()
        if decides_last(operator):
            passes.append(Pass((step,), is_decision=True))
        else:
            steps.append(step)
    end()
    return passes


def _has_share(step: Step) -> bool:
    """Return whether the step needs limits that depend on all rows."""
    return isinstance(step.operator, ShareLimits) and bool(step.operator.shares) and not step.only_measures


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
                if not current.is_decision:
                    self._run_chain(current.steps, target, run)
                elif not target.exists():
                    decide_about_all_rows(current.steps[0], self.folders[-1], target)
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

    def _run_chain(self, steps: Sequence[Step], target: Path, run: RunChain) -> None:
        """Run the steps on the partitions that are not yet in `target`."""
        source = self.folders[-1]
        for step in filter(_has_share, steps):  # the pass before has measured all rows
            step.operator.set_limits(json.loads(stats) for (stats,) in iterate_column_values(source, "stats"))
        chain = Chain(list(steps))
        pending = [partition for partition in list_partitions(source) if not (target / partition.name).exists()]
        if len(pending) < len(list_partitions(source)):
            note(f"continuing after {len(list_partitions(source)) - len(pending)} finished partitions")
        progress = Progress("rows", sum(read_counts(partition)["rows"] for partition in pending))
        with closing(chain), closing(run(chain, pending)) as outcomes:
            rows = RowStream(outcomes)
            for partition in pending:
                started, account = perf_counter(), PartitionAccount()
                count = read_counts(partition)["rows"]
                for table in rows.take(count):
                    account.add_outcomes(table)
                account.share_time(perf_counter() - started)
                account.write(target / partition.name)
                if partition is not pending[-1]:
                    progress.add(count)
            next(outcomes, None)  # at the end of the outcomes Ray stops the actors of the pass

    def _summarize(self, current: Pass) -> None:
        """Summarize the operators that the last pass has finished, and log a line for each."""
        for partition in list_partitions(self.folders[-1]):
            for number, counts in read_counts(partition)["operators"].items():
                self.counts[int(number)] = merge_reports(self.counts.get(int(number), {}), counts)
        for step in current.steps:
            if step.is_first_phase:
                continue
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
