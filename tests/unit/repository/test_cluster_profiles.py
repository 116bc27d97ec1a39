"""Rules and cluster profiles agree about the resources of a job."""

import re

import pytest
import yaml

from paths import PROJECT

RULES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((PROJECT / "rules").rglob("*.smk")))
DERIVED = re.findall(r"^use rule (\w+) as (\w+)", RULES, flags=re.MULTILINE)
BODIES = dict(re.findall(r"^(?:rule|checkpoint) (\w+):\n(.*?)(?=^\S|\Z)", RULES, flags=re.MULTILINE | re.DOTALL))
SUBMITTED = {name: body for name, body in BODIES.items() if "localrule: True" not in body}


def own_threads() -> dict[str, int]:
    matches = {
        name: re.search(r"^    threads: (\d+|GPU_STAGE_THREADS)$", body, flags=re.MULTILINE)
        for name, body in SUBMITTED.items()
    }
    least = re.search(r"^GPU_STAGE_THREADS = max\((\d+), ", RULES, flags=re.MULTILINE)[1]
    numbers = {name: threads[1].replace("GPU_STAGE_THREADS", least) for name, threads in matches.items() if threads}
    threads_by_rule = {name: int(number) for name, number in numbers.items()}
    return threads_by_rule | {name: threads_by_rule[base] for base, name in DERIVED if base in threads_by_rule}


@pytest.mark.parametrize("profile", ["slurm", "example_cluster", "cluster-generic", "kubernetes"])
def test_profiles_request_processors_of_multithreaded_rules(profile):
    settings = yaml.safe_load((PROJECT / "profiles" / profile / "config.yaml").read_text(encoding="utf-8"))
    processors = {rule: resources["cpus_per_task"] for rule, resources in settings["set-resources"].items()}
    assert processors == own_threads() != {}


def test_rules_state_runtime_and_memory_that_grows_with_attempts():
    resources = r"^        \*\*stage_resources\(([A-Z_]+|filter_memory), minutes=\d+\),$"
    assert [rule for rule, body in SUBMITTED.items() if not re.search(resources, body, flags=re.MULTILINE)] == []


def test_a_rule_derived_from_a_local_rule_is_local():
    local = set(BODIES) - set(SUBMITTED)
    declared = "\n".join(re.findall(r"^workflow\.localrules\((.+)\)$", RULES, flags=re.MULTILINE))
    assert {name for base, name in DERIVED if base in local} == set(re.findall(r'"(\w+)"', declared))
    assert DERIVED
