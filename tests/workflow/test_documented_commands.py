"""Commands in the `--help` of each script are complete, have existing flags, and equal the commands of the rules."""

import ast
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from paths import PROJECT
from small_project import copy_project

SCRIPTS = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((PROJECT / "workflow_scripts").glob("*.py"))
    if re.search(r"\b(?:make_parser|parse_paths)\b", path.read_text(encoding="utf-8"))
}
DOCS = {name: ast.get_docstring(ast.parse(text)) for name, text in SCRIPTS.items()}
COMMAND = re.compile(r"^ *((?:python|bash|deepspeed) (?:.*\\\n)*.*)$", flags=re.MULTILINE)
CONFIG = {"experiment": "dj_synth", "publish": {"repository": "me/my-model"}}
PRINTED = ("plan_memory", "doctor", "diagnose")  # people also run them, with values instead of files


def find_commands(name: str) -> list[str]:
    return [command.split(" #")[0].rstrip() for command in COMMAND.findall(DOCS[name])]


def split_arguments(command: str) -> list[str]:
    """Return the arguments without a rule's logging; `--flag=value` and `--flag value` count as equal."""
    words = shlex.split(command.replace("\\\n", " ").split(" 2> ")[0].split(" 2>&1")[0])
    return [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if "__doc__" in SCRIPTS[name]])
def test_a_command_in_help_is_complete_with_existing_flags(name):
    assert find_commands(name), "a command shows how the script is run"
    flags = set(re.findall(r'"(--[\w-]+)"', SCRIPTS[name].replace("monitor_memory.py --", "")))
    for command in find_commands(name):
        check = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert check.returncode == 0, check.stderr
        [first, *others] = command.split("\n")
        words = split_arguments(command)
        assert f"workflow_scripts/{name}.py" in words
        assert {word for word in words if word.startswith("--")} <= flags, command
        assert not any(re.search(r" {3,}", line.strip()) for line in (first, *others)), "lines were joined"
        assert all(line.startswith("    ") for line in others)


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> set[tuple[str, ...]]:
    """Return the commands that the rules run for the default configuration, as arguments."""
    project = copy_project(tmp_path_factory.mktemp("project"))
    file = project.folder / "config/config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    for files in config["benchmarks"].values():
        files |= {key: "questions.tsv" for key in files}
    config |= {"evaluations": ["pope"], "evaluation_data": "evaluations"}
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    (project.folder / "questions.tsv").touch()
    for folder in (".lmms_eval/lmms_eval", "evaluations/pope"):
        (project.folder / folder).mkdir(parents=True)
    targets = ["baseline", "dj_synth", "analyze", "ablation", "lora_sweep", "deepspeed_configs"]
    further_targets = ["challenge", "evaluate", "export", "publish", "crate", "decide", "plan", "leaderboard"]
    script = PROJECT / "tests/support/shell_commands.py"
    process = subprocess.run(
        [sys.executable, script, json.dumps(CONFIG), *targets, *further_targets],
        cwd=project.folder,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    jobs = json.loads(process.stdout.splitlines()[-1])["jobs"]
    return {tuple(split_arguments(command)) for _, command in jobs}


def test_documented_command_of_a_stage_equals_its_rule(commands):
    scripts = {word for command in commands for word in command if re.fullmatch(r"workflow_scripts/\w+\.py", word)}
    names = [name for name in SCRIPTS if f"workflow_scripts/{name}.py" in scripts and name not in PRINTED]
    documented = {name: {tuple(split_arguments(command)) for command in find_commands(name)} for name in names}
    assert len(documented) > 20
    assert {
        name: sorted(script_commands - commands)
        for name, script_commands in documented.items()
        if script_commands - commands
    } == {}
