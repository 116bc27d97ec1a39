"""Training runs in forks of a process that has imported everything, which saves the time of the imports.

    with Forks(folder) as forks:
        forks.run("finetune.py", {...settings}, {"--data": ..., ...}, output)

The parent has imported torch, transformers and DeepSpeed, but has no process group, threads or GPU.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forked_python import forked_python
from paths import PROJECT

SCRIPTS = PROJECT / "workflow_scripts"
# torchao would compile its update for minutes
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}

SERVE = "import torch, forked_training; torch.set_num_threads(1); forked_training.serve()"


@dataclass(frozen=True)
class ProcessResult:
    """Exit statuses of one or several processes (negative: the signal), and the output of the first."""

    statuses: list[int]
    printed: str

    @property
    def ok(self) -> bool:
        return not any(self.statuses)


class Forks:
    """Parent process of training runs, which `run` requests."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs = 0

    def __enter__(self) -> "Forks":
        self.parent = subprocess.Popen(
            [forked_python(), "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        return self

    def __exit__(self, *_) -> None:
        self.parent.stdin.close()
        self.parent.wait()

    def run(
        self,
        script: str,
        flags: dict,
        processes: int = 1,
        kill_at: int | None = None,
        out_of_memory_at: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> ProcessResult:
        """Run a training script.

        Args:
            flags: its command line.
            kill_at: the processes kill themselves at the end of this step, before it is saved.
            out_of_memory_at: step at whose end the GPU of the last process reports that it has run out of memory.
            environment: further environment variables.
        """
        self.runs += 1
        logs = [str(self.folder / f"{self.runs}-{rank}.log") for rank in range(processes)]
        arguments = [str(word) for flag in flags.items() for word in flag]
        request = {"script": script, "words": arguments, "logs": logs, "kill_at": kill_at, "port": free_port()}
        request |= {"out_of_memory_at": out_of_memory_at, "environment": environment or {}}
        self.parent.stdin.write(json.dumps(request) + "\n")
        self.parent.stdin.flush()
        return ProcessResult(json.loads(self.parent.stdout.readline()), Path(logs[0]).read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    path = [str(SCRIPTS), str(PROJECT / "tests/support")]
    return os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def serve() -> None:
    """Read runs from stdin, one JSON object per line, and print their exit statuses."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        children = [fork(request, rank) for rank in range(len(request["logs"]))]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), file=answers, flush=True)


def warm_up() -> None:
    """Import modules, load DeepSpeed's extensions and read the processor's name once for all runs."""
    import cpuinfo
    import torch.utils.tensorboard  # noqa: F401
    import torchao.optim  # noqa: F401
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: F401
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import finetune  # noqa: F401
    import pretrain  # noqa: F401
    import train_text_model  # noqa: F401
    from dj2mgm.training import settings, stage
    from dj2mgm.training.library_patches import apply_library_patches

    apply_library_patches()
    cpuinfo.get_cpu_info()
    for builder in (CPUAdamBuilder, ShareMemCommBuilder):
        builder().load(verbose=False)
    get_checkpoint_conversion_mapping("gemma")
    settings.find_modules = cache(settings.find_modules)
    for script in ("pretrain", "finetune", "train_text_model"):
        settings.find_modules(SCRIPTS / f"{script}.py")
    stage.require_memory = lambda *_: {}  # planning takes as long as such a training
    gc.collect()
    gc.freeze()


def fork(request: dict, rank: int) -> int:
    if child := os.fork():
        return child
    status = 1
    try:
        log = os.open(request["logs"][rank], os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        train(request, rank)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def train(request: dict, rank: int) -> None:
    import importlib

    import torch

    from dj2mgm.training.trainer import ResumableTrainer

    os.environ |= request["environment"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"]), "RANK": str(rank)}
    processes = str(len(request["logs"]))
    # launch.sh sets LOCAL_SIZE, too; without it DeepSpeed would start numactl at each reduction of gradients
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": processes, "LOCAL_SIZE": processes}
    sys.argv = [str(SCRIPTS / request["script"]), *request["words"]]
    sys.orig_argv = [forked_python(), *sys.argv]  # arguments with which a process starts again
    if request["kill_at"] or request["out_of_memory_at"]:
        save = ResumableTrainer._maybe_log_save_evaluate

        def end_or_save(trainer, *args, **kwargs):
            if trainer.state.global_step == request["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if trainer.state.global_step == request["out_of_memory_at"] and rank == len(request["logs"]) - 1:
                raise torch.OutOfMemoryError
            save(trainer, *args, **kwargs)

        ResumableTrainer._maybe_log_save_evaluate = end_or_save
    importlib.import_module(Path(request["script"]).stem).main()
