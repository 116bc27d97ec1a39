"""Snakemake in forks of a process that has imported it, which saves the time of the imports.

    completed = run_snakemake(["baseline", "--dry-run"], folder, environment)

The parent has imported Snakemake but none of the project's modules, which each process imports from its own folder.
Files of rules with the same name and content in several copies of the project are parsed once.
"""

import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


def run_snakemake(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run Snakemake in `folder`; the result is the same as from `subprocess.run` with captured text."""
    with tempfile.TemporaryDirectory() as logs:
        outputs = [f"{logs}/stdout", f"{logs}/stderr"]
        request = {"arguments": arguments, "folder": str(folder), "environment": environment, "outputs": outputs}
        parent = start_parent()
        parent.stdin.write(json.dumps(request) + "\n")
        parent.stdin.flush()
        status = int(parent.stdout.readline())
        stdout, stderr = (Path(output).read_text(encoding="utf-8", errors="replace") for output in outputs)
    return subprocess.CompletedProcess(arguments, status, stdout, stderr)


@cache
def start_parent() -> subprocess.Popen:
    """Start a parent, which ends with this process, because its input ends."""
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """Read requests from stdin, one JSON object per line, and print the exit status of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_everything()
    with tempfile.TemporaryDirectory() as folder:
        keep_parsed_rules(Path(folder))
        for line in sys.stdin:
            child = fork(json.loads(line))
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def keep_parsed_rules(folder: Path) -> None:
    """Let forks share the Python code that Snakemake generates from a rule file, with a mark for the file's path."""
    import snakemake.workflow

    parse, mark = snakemake.workflow.parse, "PATH OF THE RULES"

    def parse_once(source, workflow, linemap: dict[int, int], rulecount: int = 0) -> tuple[str, int]:
        path = Path(source.get_path_or_uri(secret_free=True))
        key = hashlib.sha256(f"{rulecount} {path.name} {path.read_text(encoding='utf-8')}".encode()).hexdigest()
        cached_file = folder / key
        if not cached_file.exists():
            code, count = parse(source, workflow, linemap, rulecount=rulecount)
            new_file = folder / f"{key}.{os.getpid()}"
            new_file.write_text(
                json.dumps([code.replace(repr(str(path)), mark), count, [*linemap.items()]]), encoding="utf-8"
            )
            new_file.rename(cached_file)
            return code, count
        code, count, lines = json.loads(cached_file.read_text(encoding="utf-8"))
        linemap.update(lines)
        return code.replace(mark, repr(str(path))), count

    snakemake.workflow.parse = parse_once


def import_everything() -> None:
    """Import all modules of Snakemake, also late imports of Snakemake and of the Snakefile."""
    import difflib  # noqa: F401
    import graphlib  # noqa: F401

    import docutils.core  # noqa: F401
    import dpath  # noqa: F401
    import jinja2  # noqa: F401
    import jsonschema  # noqa: F401
    import packaging.version  # noqa: F401
    import psutil  # noqa: F401
    import pydantic.functional_serializers  # noqa: F401
    import requests  # noqa: F401
    import smart_open  # noqa: F401
    import snakemake.cli
    import snakemake.profiles  # noqa: F401
    import snakemake.report  # noqa: F401
    import snakemake.storage  # noqa: F401

    snakemake.cli.get_argument_parser()  # imports plugins
    gc.collect()
    gc.freeze()  # collections of a fork then copy no memory of these objects


def fork(request: dict) -> int:
    if child := os.fork():
        return child
    import snakemake.cli

    status = 1
    try:
        os.setpgid(0, 0)
        redirect(request["outputs"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["snakemake", *request["arguments"]]  # the Snakefile reads it
        sys.orig_argv = [sys.executable, "-m", *sys.argv]  # a run that takes over starts again with this argument
        snakemake.cli.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def redirect(outputs: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdin = open(0)


if __name__ == "__main__":
    serve()
