"""Values of the configuration and file names are never run by a shell; each stays within one argument."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import yaml

from dj2mgm.features.challenge.challenge_keys import read_declarations
from dj2mgm.model_files.missing_models import PART_KEYS
from dj2mgm.settings.base import build_schema
from dj2mgm.settings.configuration import Configuration
from dj2mgm.settings.models import AssembledModel, MgmModel
from dj2mgm.settings.string_formats import make_name
from paths import PROJECT
from small_project import copy_project
from source_files import PAIR

RUN = "; touch X $(touch X) `touch X` & touch X & | touch X #* ~ ! [a] > X <X $HOME ü 山 %s --flag=x"
# some settings need the placeholder `{question}`; `{input}` and `{x}` are not placeholders
VALUE = RUN + " ' ; touch X ; ' \" ; touch X ; \" \\ {x} {input} {question}\ntouch X\n"
PATH = RUN + " ' ; touch X ; ' \" ; touch X ; \" \\ "  # a hostile but valid folder name
# hostile text by the schema's `format`; None if the format accepts none
TEXTS = {"path": PATH, "question_prompt": PATH + "\ntouch X\n{question}", "question": VALUE}
TEXTS |= {"name": None, "address": None, "variable": None, "repository": None}
STUBS = ("python", "bash", "tee", "sed", "touch", "X")
# keys that name a chat template, a dataset, an operator, or a module of the language model
TEMPLATES = {"pretrain_template": "plain", "template": "gemma"}
NAMES = {"dataset", "model", "without", "targets"}


class Hostile:
    """Factory of distinct values that begin and end with their own mark."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self._numbers = count(1)

    def value(self, text: str) -> str:
        mark = f"h{next(self._numbers)}h"
        self.values[mark] = f"-{mark}{text}{mark}"
        return self.values[mark]

    def name(self) -> str:
        """Return a valid name of a file in config/."""
        mark = f"h{next(self._numbers)}h"
        self.values[mark] = f"{mark}.x-y_{mark}"
        return self.values[mark]

    def make_values(self, schema: dict) -> object:
        """Return a value for each string that the schema accepts; None if it accepts no string."""
        kinds = schema.get("type", [])
        if "string" in kinds and "enum" not in schema:
            text = TEXTS[schema["format"]] if "format" in schema else VALUE
            return text and self.value(text)
        if kinds == "array":
            item = self.make_values(schema["items"])
            return None if item is None else [item]
        values = {
            key: self.make_values(property_schema)
            for key, property_schema in schema.get("properties", {}).items()
            if key not in NAMES
        }
        return {key: value for key, value in values.items() if value is not None} or None


TURNS = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a"}]
CONTENTS = {
    "config.json": "{}",
    "model.safetensors": "\x02\0\0\0\0\0\0\0{}",  # without tensors
    "captions.jsonl": PAIR,
    "instructions.json": json.dumps([{"id": "1", "image": "1.png", "conversations": TURNS}]),
}


def merge_values(old: dict, new: dict) -> dict:
    both = {key: merge_values(old[key], new[key]) for key in new if isinstance(old.get(key), dict)}
    return old | new | both


class HostileProject:
    """Small project whose files and settings have hostile names and values wherever Snakemake accepts them."""

    def __init__(self, folder: Path):
        self.hostile, self.project = Hostile(), copy_project(folder)
        small = PROJECT / "tests/fixtures/small"
        model = yaml.safe_load((small / "models_small.yaml").read_text())
        hostile = self.hostile.make_values(build_schema(MgmModel))
        parts = merge_values(model, hostile | TEMPLATES | {"settings": model["settings"]})
        self.model, self.shipped = self.tiny(model), self.tiny(model)
        del parts["foundation"]
        for part in PART_KEYS:
            (folder / parts[part]).mkdir()
        self.parts = self.write("models", parts | {"clip": f"results/foundation/{self.model}/clip"})
        self.ship(model["foundation"])
        self.dataset = self.folder_with("captions.jsonl", "instructions.json", text=RUN)
        recipe = yaml.safe_load((folder / "config/recipes/dj_synth.yaml").read_text())
        recipe["process"].append({"text_length_filter": {"text_key": self.hostile.value(VALUE)}})
        self.recipe = self.write("recipes", recipe)
        self.deepspeed = self.hostile.name()
        shutil.copy(folder / "config/deepspeed/zero3.json", folder / f"config/deepspeed/{self.deepspeed}.json")
        batches = {"micro_batch_size": 1, "gradient_accumulation_steps": 128, "activation_checkpointing": True}
        tiny = {"tiny": "llava", "foundation": self.model, "clip": "clip", "settings": {"finetune": batches}}
        self.experiments = [
            self.other_parts(),
            self.own_data_and_model(),
            self.write("experiments", {"model": self.write("models", tiny)}),
            self.write("experiments", {"model": self.shipped}),
        ]
        self.studies = [self.write("studies", self.search()), self.write("studies", self.mixtures())]
        self.defaults()

    def search(self) -> dict:
        design = {"kind": "search", "space": {"finetune.learning_rate": [1e-4, 2e-4]}}
        return {"description": self.hostile.value(VALUE), "experiment": self.experiments[0], "design": design}

    def mixtures(self) -> dict:
        sources = {}
        for split in ("pretrain", "finetune", "finetune", "evaluation"):
            file = f"{self.folder_with('a.png')}/{self.hostile.value(PATH)}.jsonl"
            (self.project.folder / file).write_text(PAIR, encoding="utf-8")
            sources[self.hostile.name()] = {"format": "data_juicer", "path": file, "split": split}
        dataset = self.write("datasets", {"sources": sources})
        experiment = self.write("experiments", {"model": self.shipped, "dataset": dataset})
        design = {"kind": "sample", "points": 6, "mixture": {"sources": list(sources)[1:3]}, "merged": 2}
        return {"experiment": experiment, "design": design}

    def write(self, kind: str, values: dict, name: str = "") -> str:
        name = name or self.hostile.name()
        (self.project.folder / "config" / kind / f"{name}.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        return name

    def tiny(self, model: dict) -> str:
        name = self.hostile.name()
        return self.write("models", model | {"clip": f"results/foundation/{name}/clip"}, name)

    def folder_with(self, *files: str, text: str = PATH) -> str:
        name = self.hostile.value(text)
        for file in files:
            (self.project.folder / name).mkdir(exist_ok=True)
            (self.project.folder / name / file).write_text(CONTENTS.get(file, ""), encoding="utf-8")
        return name

    def ship(self, foundation: dict) -> None:
        """Write the files of a shipped model's parts."""
        folder = self.project.folder / "config/foundation" / self.shipped
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(foundation), encoding="utf-8")
        for part in ("clip", "convnext", "language_model"):
            (folder / part).mkdir()
            (folder / part / self.hostile.name()).touch()

    def other_parts(self) -> str:
        synthesize = {"recipe": self.recipe, "captioner": "blip2"}
        return self.write("experiments", {"model": self.parts, "synthesize": synthesize})

    def own_data_and_model(self) -> str:
        assembled = self.folder_with("config.json", "model.safetensors")
        model = {"assembled": assembled} | TEMPLATES
        model = self.hostile.make_values(build_schema(AssembledModel)) | model
        (self.project.folder / model["clip"]).mkdir()
        files, folder = (self.hostile.value(PATH) for _ in range(3)), self.folder_with("a.png")
        split = [{"file": f"{folder}/{file}", "images": folder} for file in files]
        for entry in split:
            (self.project.folder / entry["file"]).touch()
        dataset = {"pretrain": split[0], "finetune": split[1], "evaluation": split[2]}
        dataset["pretrain"] |= {"questions": split[1]["file"], "license": self.hostile.value(VALUE)}
        dataset["finetune"] |= {"license": self.hostile.value(VALUE)}
        names = {"dataset": self.write("datasets", dataset), "model": self.write("models", model)}
        captioner = {"recipe": self.recipe, "mgm": {"experiment": self.write("experiments", names)}}
        return self.write("experiments", names | {"synthesize": captioner})

    def defaults(self) -> None:
        """Write config.yaml with a hostile value for each string of the schema; names refer to hostile names."""
        values = self.hostile.make_values(build_schema(Configuration))
        benchmarks = values["benchmarks"] = {name: dict.fromkeys(d.files) for name, d in read_declarations().items()}
        for name in benchmarks:
            folder = self.folder_with(*("questions", "answers"))
            benchmarks[name] = {key: folder if key == "images" else f"{folder}/{key}" for key in benchmarks[name]}
            for key in benchmarks[name]:
                (self.project.folder / folder / key).touch()
            if "questions" in benchmarks[name]:
                benchmarks[name]["questions"] = f"{folder}/questions"
        values |= {"evaluations": ["pope"], "evaluation_data": self.hostile.value(PATH)}
        for folder in (".lmms_eval/lmms_eval", f"{values['evaluation_data']}/pope"):
            (self.project.folder / folder).mkdir(parents=True)
        for folder in values["decontaminate"]["folders"]:
            (self.project.folder / folder).mkdir(exist_ok=True)
        values |= {"dataset": self.dataset, "model": self.model, "seeds": [0, 1]}
        values["report"] = {"experiments": ["baseline", "dj_synth", *self.experiments]}
        values["finetune"] = {"deepspeed": self.deepspeed}
        values["trusted_recipes"] = True  # other keys accept no such string
        values["publish"] = {"weights": "merged"}
        values["publish"] |= {"repository": "me/my-model", "dataset_repository": "me/my-data"}
        values["experiment"] = self.experiments[1]
        file = self.project.folder / "config/config.yaml"
        file.write_text(yaml.safe_dump(merge_values(yaml.safe_load(file.read_text()), values)), encoding="utf-8")

    def commands(self) -> dict:
        further_targets = [
            "ablation",
            "lora_sweep",
            "lora_vs_full",
            "finetune_minimal",
            "challenge",
            "evaluate",
            "export",
            "publish",
            "crate",
            "decide",
            "leaderboard",
            "serve_check",
        ]
        targets = [
            "baseline",
            "dj_synth",
            *self.experiments,
            *self.studies,
            "analyze",
            "check",
            "help",
            "doctor",
            "plan",
            "deepspeed_configs",
            *further_targets,
        ]
        config = {"description": self.hostile.value(VALUE)}
        result = self.dry_run(config, *targets)
        [score_command] = [command for rule, command in result["jobs"] if rule == "score_trials"]
        folder = re.search(r"results/[^']+/search/[0-9a-f]{8}", score_command)[0]
        for target in ("fetch", f"{folder}/batch-1/trials.yaml"):
            result["jobs"] += self.dry_run(config, target)["jobs"]
        return result

    def dry_run(self, config: dict, *targets: str) -> dict:
        script = PROJECT / "tests/support/shell_commands.py"
        process = subprocess.run(
            [sys.executable, script, json.dumps(config), *targets],
            cwd=self.project.folder,
            env=self.project.environment(),
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0 and "{" in process.stdout, (process.stdout + process.stderr)[-4000:]
        return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> HostileProject:
    return HostileProject(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def commands(hostile) -> dict:
    return hostile.commands()


def record_calls(folder: Path, commands: list[str]) -> list[list[str]]:
    """Return the arguments of every program that bash starts for these commands; all programs are fakes."""
    programs, work = folder / "programs", folder / "here"
    for new_folder in (
        programs,
        work,
        *(
            work / "results" / rule
            for rule in ("check", "help", "doctor", "plan", "decide", "leaderboard", "fetch", "serve_check")
        ),
    ):
        new_folder.mkdir(parents=True)
    for name in STUBS:
        (programs / name).write_text(f"#!/bin/sh\nprintf '%s\\0' {name} \"$@\" > {folder}/$$.call\n")
        (programs / name).chmod(0o755)
    script = folder / "script"
    script.write_text("".join(f"( {command}\n)\n" for command in commands), encoding="utf-8")
    for check in (["-n"], []):
        process = subprocess.run(
            ["/bin/bash", *check, script], cwd=work, env={"PATH": str(programs)}, capture_output=True, text=True
        )
        assert process.returncode == 0 and not process.stderr, process.stderr[:2000]
    assert os.listdir(work) == ["results"]
    return [call.read_text(encoding="utf-8").split("\0")[:-1] for call in folder.glob("*.call")]


def find_strings_in_settings(document: str) -> list[str]:
    """Return the strings in a file of settings, and the words of the commands that a plan shows."""
    values = yaml.safe_load(document)
    commands = values.pop("next", [])
    return find_strings(json.dumps(values)) + [word for command in commands for word in shlex.split(command)]


def find_strings(argument: str) -> list[str]:
    """Return the argument, or all strings in it if it is JSON."""
    if not argument.startswith("{"):
        return [argument]
    strings, remaining = [], [json.loads(argument)]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict):
            remaining += [*value, *value.values()]
        elif isinstance(value, list):
            remaining += value
        elif isinstance(value, str):
            strings.append(value)
    return strings


def test_every_rule_has_a_tested_command(commands):
    assert {rule for rule, _ in commands["jobs"]} == set(commands["rules"])


def test_hostile_values_and_names_stay_single_arguments(hostile, commands, tmp_path):
    found_marks = set()
    calls = record_calls(tmp_path, [command for _, command in commands["jobs"]])
    assert len(calls) > len(commands["jobs"])
    assert {program for program, *_ in calls} <= {"python", "bash", "tee", "sed"}
    texts = [text for _, *arguments in calls for argument in arguments for text in find_strings(argument)]
    texts += [text for document in commands["settings"] for text in find_strings_in_settings(document)]
    for text in texts:
        text = re.sub(r"\s*\n\s+", " ", text)  # YAML in a note wraps long strings
        marks = re.findall(r"h\d+h", text)
        for mark in set(marks):
            value = hostile.hostile.values[mark]
            # make_name: a proposed file in config/datasets
            names = sum(text.count(name) for name in {value, make_name(value)})
            assert marks.count(mark) == 2 * names, (text, mark)
        found_marks |= set(marks)
    assert len(found_marks) > 25, "hostile values are used"


def test_all_placeholders_of_shell_commands_are_quoted():
    """This includes values that are harmless today."""
    files = [*PROJECT.glob("rules/*.smk"), PROJECT / "Snakefile", *PROJECT.glob("profiles/*/config.yaml")]
    lines = [line.split(" #")[0] for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    pattern = r"\{(?:rule|input|output|log|params|wildcards|resources|threads)\b[^{}]*\}"
    placeholders = [match for line in lines if 'f"' not in line or "{{" in line for match in re.findall(pattern, line)]
    assert (
        len(placeholders) > 50
        and [placeholder for placeholder in placeholders if not placeholder.endswith(":q}")] == []
    )


def test_an_experiments_name_does_not_match_other_folders(fresh):
    (fresh.folder / "config/experiments/a.b.yaml").touch()
    assert "nothing makes this target" in fresh.run("results/a-b/filter/config.yaml", "--dry-run", ok=False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("it's $(touch X)", "must have no braces, quotes"), ("my {photos}/all", "must be a path without braces")],
)
def test_a_dataset_name_unsupported_by_snakemake_is_refused(fresh, name, problem):
    folder = fresh.folder / name
    folder.mkdir(parents=True)
    (folder / "captions.jsonl").touch()
    printed = " ".join(fresh.run("baseline", "--dry-run", ok=False, config=(f"dataset={folder}",)).split())
    assert problem in printed and "Traceback" not in printed
