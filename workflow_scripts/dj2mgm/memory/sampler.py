"""memory.csv: a training stage's memory over time, written by a thread of the stage itself.

Rows are appended to a file beside the resume checkpoints, which outlives a failed attempt; the declared memory.csv is
written from it last.
"""

import csv
import os
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from dj2mgm import messages
from dj2mgm.files import write_text
from dj2mgm.memory.readings import GIB, Reading, read_memory
from dj2mgm.memory.records import LEADING, read_columns, start_file

INTERVAL_S = 1.0
REST = 200  # a reading is followed by a rest this many times as long: well below 1 % of the time, however slow it is
GPU_WARNING, HOST_WARNING = 0.8, 0.7  # shares in use


def job() -> psutil.Process:
    """This process where it trains alone, with others the launcher that started them on this node."""
    return psutil.Process(os.getppid() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None)


class MemorySampler:
    """Samples from `start` to `finish`, in the first process of a node only. `phase` is what the stage is doing now.

    Args:
        file: what the rows are appended to.
        resumed: whether the file's rows belong to this run, or are to be dropped.
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
        """Stop, and copy the rows into `folder`; return a record for metrics.json, None where nothing was sampled."""
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
        process = job()
        columns = [*LEADING, *read_memory(process).columns()]
        attempt = start_file(self.file, columns, self.resumed)
        warned: set[str] = set()
        with open(self.file, "a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, read_columns(self.file), lineterminator="\n")
            last = False
            while not last:
                last = self._stop.is_set()  # set while resting: one more reading, of the end
                begin = time.monotonic()
                self.last = read_memory(process)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                leading = zip(LEADING, (attempt, now, round(begin - self._start, 2), self.phase), strict=True)
                writer.writerow(dict(leading) | self.last.columns())
                file.flush()
                warn(self.last, warned)
                took = time.monotonic() - begin
                self._reading_seconds += took
                self._stop.wait(max(INTERVAL_S, REST * took))


def warn(reading: Reading, warned: set[str]) -> None:
    """Say once that a GPU or the host is nearly full; `warned` remembers what was said."""
    for gpu in reading.gpus:
        if gpu.used > GPU_WARNING * gpu.total:
            _say_once(
                warned,
                f"GPU {gpu.index}",
                f"{gpu.used / gpu.total:.0%} full ({gpu.used / GIB:.1f} of {gpu.total / GIB:.1f} GiB); a longer batch "
                "may not fit: lower micro_batch_size and raise gradient_accumulation_steps",
            )
    if reading.host_share > HOST_WARNING:
        _say_once(
            warned,
            "host memory",
            f"{reading.host_share:.0%} full (limit {reading.host_limit / GIB:.1f} GiB, of which this job holds "
            f"{reading.job / GIB:.1f}); when it is full the kernel kills (exit code -9): lower loader_workers, or "
            "choose a deepspeed configuration that offloads less",
        )


def _say_once(warned: set[str], what: str, text: str) -> None:
    if what not in warned:
        warned.add(what)
        messages.warn(f"{what} is {text}")
