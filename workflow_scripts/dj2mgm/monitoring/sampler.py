"""Sampler of a training stage's memory, a thread of the stage that writes memory.csv.

Rows are appended to a file in the folder of the resume checkpoints, which outlives a failed attempt. The declared
memory.csv is copied from it last.
"""

import csv
import os
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from dj2mgm.cli import messages
from dj2mgm.monitoring.memory_csv import GIB, LEADING_COLUMNS, read_columns, start_file
from dj2mgm.monitoring.readings import Reading, read_memory
from dj2mgm.storage.files import write_text

INTERVAL_S = 1.0
PAUSE_FACTOR = 200  # the pause after a reading is 200 times as long, so that sampling takes well below 1 % of the time
GPU_WARNING, HOST_WARNING = 0.8, 0.7  # shares in use


def find_job_process() -> psutil.Process:
    """Return this process if it trains alone, else the launcher that started the processes of this node."""
    return psutil.Process(os.getppid() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None)


class MemorySampler:
    """Thread that samples memory from `start` to `finish`, in the first process of each node, into `file`.

    `phase` is the value of the next rows' column `phase`. A resumed run keeps the rows of the file.
    """

    def __init__(self, file: Path, resumed: bool):
        self.phase = "loading"
        self.sampling = int(os.environ.get("LOCAL_RANK", 0)) == 0
        first_node = int(os.environ.get("RANK", 0)) == 0
        self.file = file if first_node else file.with_stem(f"{file.stem}-{socket.gethostname()}")
        self.resumed = resumed
        self.last: Reading | None = None
        self._reading_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory sampler", daemon=True)

    def start(self) -> None:
        self._start = time.monotonic()
        if self.sampling:
            self._thread.start()

    def finish(self, folder: Path) -> dict | None:
        """Stop and copy the rows into `folder`; return a record for metrics.json, None if nothing was sampled here."""
        if not self.sampling:
            return None
        self._stop.set()
        self._thread.join()
        seconds = time.monotonic() - self._start
        write_text(folder / self.file.name, self.file.read_text(encoding="utf-8"))
        gpus = [gpu.total for gpu in self.last.gpus]
        return {
            "host_limit_gib": round(self.last.host_limit / GIB, 2),
            "gpu_limit_gib": round(min(gpus) / GIB, 2) if gpus else None,
            "sampler_share": round(self._reading_seconds / seconds, 5),
        }

    def _sample(self) -> None:
        """Write readings until `finish` is called, and one at the end; reading takes a limited share of the time."""
        process = find_job_process()
        columns = [*LEADING_COLUMNS, *read_memory(process).build_row()]
        attempt = start_file(self.file, columns, self.resumed)
        warned_names: set[str] = set()
        with open(self.file, "a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, read_columns(self.file), lineterminator="\n")
            is_last = False
            while not is_last:
                is_last = self._stop.is_set()  # if set during the pause, one more reading records the end
                start = time.monotonic()
                self.last = read_memory(process)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                leading = zip(LEADING_COLUMNS, (attempt, now, round(start - self._start, 2), self.phase), strict=True)
                writer.writerow(dict(leading) | self.last.build_row())
                file.flush()
                warn_if_full(self.last, warned_names)
                elapsed = time.monotonic() - start
                self._reading_seconds += elapsed
                self._stop.wait(max(INTERVAL_S, PAUSE_FACTOR * elapsed))


def warn_if_full(reading: Reading, warned_names: set[str]) -> None:
    """Warn once for each GPU, and once for the host, if its memory is nearly full; update `warned_names`."""
    for gpu in reading.gpus:
        if gpu.used > GPU_WARNING * gpu.total:
            _warn_once(
                warned_names,
                f"GPU {gpu.index}",
                f"{gpu.used / gpu.total:.0%} full ({gpu.used / GIB:.1f} of {gpu.total / GIB:.1f} GiB). A longer batch "
                "may not fit: lower micro_batch_size and raise gradient_accumulation_steps",
            )
    if reading.host_share > HOST_WARNING:
        _warn_once(
            warned_names,
            "host memory",
            f"{reading.host_share:.0%} full (limit {reading.host_limit / GIB:.1f} GiB, held by this job "
            f"{reading.job / GIB:.1f} GiB). When it is full, the kernel kills the job (exit code -9): lower "
            "loader_workers, or choose a DeepSpeed configuration that offloads less",
        )


def _warn_once(warned_names: set[str], name: str, state: str) -> None:
    if name not in warned_names:
        warned_names.add(name)
        messages.warn(f"{name} is {state}")
