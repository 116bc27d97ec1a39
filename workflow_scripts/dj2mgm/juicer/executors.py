"""Executors of a chain of operators: processes of this machine, or Ray on this machine or a cluster.

Both give the same outcomes in the same order, and are at most a few batches ahead of the caller.
"""

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from dj2mgm.cli.messages import note
from dj2mgm.errors import InputError
from dj2mgm.juicer.chain import Chain
from dj2mgm.juicer.partitions import iterate_batches, list_batches, read_batch
from dj2mgm.juicer.patched_data_juicer import load_ray_dataset_class, make_package_error
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.storage.streaming import map_in_order

OBJECT_STORE = 256 * 2**20  # bytes; for batches of some hundred KB each
RunChain = Callable[[Chain, list[Path]], Iterator[pa.Table]]  # outcomes of the partitions' rows, in their order


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
