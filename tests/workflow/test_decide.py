"""`snakemake decide` adds seeds until a verdict or the end of the budget, also after a kill, and refuses errors."""

import re

import pytest
from snakemake.cli import parse_config

from dj2mgm.errors import InputError
from dj2mgm.features.decide.looks import check_decidable
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import find_variant_sources
from dj2mgm.storage.files import read_json, read_yaml, write_text
from killed_runs import kill_midway
from quick_stages import read_calls, replace_stages
from small_project import SMALL, copy_project

LEVELS = {"baseline": 0.5, "other": 0.9, "alike": 0.515, "winner": 0.9, "runner_up": 0.91, "winner-random": 0.5}
OTHER = "finetune: {learning_rate: 2.0e-3}\n"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return a project with immediate stages, whose experiment `other` is better than the baseline."""
    project = copy_project(tmp_path_factory.mktemp("quick"))
    write_text(project.folder / "config/experiments/other.yaml", OTHER)
    replace_stages(project, LEVELS, spread=0.01)
    return project


def decide(project, *config, experiment="other", ok=True) -> str:
    return project.run("decide", ok=ok, config=(f"experiment={experiment}", *config))


def read_looks(project) -> dict[int, dict]:
    """Return the looks by number of seeds."""
    files = (project.folder / "results/small/small/other/decide").glob("seeds-*/look.yaml")
    return {len(look["seeds"]): look for look in sorted(map(read_yaml, files), key=lambda look: len(look["seeds"]))}


@pytest.mark.slow  # test_kill_and_resume.py kills stages, and a unit test searches
def test_a_killed_decision_continues_until_it_is_decided(quick):
    (quick.folder / "finetune-2.wait").touch()
    last = {"finetune baseline 2", "finetune other 2"}
    kill_midway(
        quick, lambda: not last.isdisjoint(read_calls(quick)), "decide", config=("experiment=other",), whole_tree=True
    )
    first = read_looks(quick)
    assert list(first) == [2] and first[2]["kind"] == "undecided"
    (quick.folder / "finetune-2.wait").unlink()
    printed = decide(quick)
    looks = read_looks(quick)
    *open_looks, last = looks.values()
    assert looks[2] == first[2] and list(looks) == list(range(2, 2 + len(looks))) and len(looks) >= 2
    assert {look["kind"] for look in open_looks} == {"undecided"} and last["kind"] == "better"
    assert [look["spent"] for look in looks.values()] == sorted(look["spent"] for look in looks.values())
    ran = [call for call in read_calls(quick) if call.startswith("finetune ")]
    assert len(ran) == len({*ran}) + 1, "only the killed training runs again"
    assert set(ran) == {f"finetune {side} {seed}" for side in ("baseline", "other") for seed in last["seeds"]}
    decided = f"After {len(last['seeds'])} of at most 10 seeds, other is better than baseline: probability of the "
    assert decided in printed and ", corrected for all looks)." in printed
    folder = quick.result("decide", "other")
    page = (folder / "decision.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert decided in page and page.count("<tr") == 1 + len(looks)
    record = read_json(folder / "decision.json")
    assert record["verdict"] == f"Better after {len(last['seeds'])} seeds" and decided in record["statement"]
    before = read_calls(quick)
    assert decided in decide(quick) and read_calls(quick) == before, "the same command only prints"


def test_a_spent_budget_shows_the_cost_and_can_be_increased(quick):
    """Run after the test above, whose seeds are used again."""
    write_text(quick.folder / "config/experiments/alike.yaml", "finetune: {learning_rate: 3.0e-3}\n")
    config = ("experiment=alike", "report={margin: 0.0}")
    printed = quick.run("decide", config=(*config, "decide={seeds: 2}"))
    assert "After 2 of at most 2 seeds, it is undecided whether alike is better than baseline" in printed
    assert "If the true difference equals the measured one, " in printed
    assert " would decide with 80 % probability." in printed
    looks = [quick.result(f"decide/seeds-{number}/look.yaml", "alike") for number in (2, 3)]
    before = looks[0].read_bytes()
    quick.run("decide", config=(*config, "decide={seeds: 3}"))
    assert looks[0].read_bytes() == before
    assert [read_yaml(look)["spent"] for look in looks] == pytest.approx([0.045, 0.0495])
    assert "After 3 of at most 3 seeds" in quick.run("decide", config=(*config, "seeds=[0,1,2]", "decide={seeds: 3}"))
    hours = quick.run("decide", config=(*config, "decide={seeds: 9, hours: 1.0e-7}"))
    assert "After 2 of at most 9 seeds and " in hours and " of at most 1e-07 hours, it is undecided whether" in hours


def test_each_opponent_has_its_own_looks_and_all_share_trainings(quick):
    """Run after the tests above, whose seeds are used again."""
    experiments = quick.folder / "config/experiments"
    text = "arguments: {words_num_filter: {max_num: 10}}\ncontrols: [random]\nseeds: [1]\n"
    write_text(experiments / "winner.yaml", text)
    write_text(experiments / "runner_up.yaml", "finetune: {learning_rate: 4.0e-3}\n")
    config = ("experiment=winner", "report={margin: 0.0}")
    against = "decide={against: [baseline, runner_up, winner-random], seeds: 2}"
    printed = quick.run("decide", config=(*config, against))
    for text in ("winner is better than baseline: ", "whether winner is better than runner_up: "):
        assert text in printed
    assert (
        "Conclusion: winner is better than baseline and winner-random, but not shown to be better than runner_up "
        "(undecided)."
    ) in printed
    folder = quick.result("decide", "winner")
    looks = {str(file.parent.parent.relative_to(folder)) for file in folder.rglob("look.yaml")}
    assert looks == {".", "runner_up", "winner-random"}
    last = read_yaml(folder / "runner_up/seeds-2/look.yaml")
    assert (last["against"], last["seeds"]) == ("runner_up", [1, 2]), "seeds after the configured one"
    assert read_json(folder / "runner_up/decision.json")["verdict"] == "Undecided after 2 seeds"
    trained = [call for call in read_calls(quick) if call.startswith("finetune winner ")]
    assert len(trained) == len({*trained}) == 2
    before = read_calls(quick)
    quick.run("decide", config=(*config, "decide={seeds: 2}"))
    assert read_calls(quick) == before, "the baseline alone has the same looks"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (("experiment=baseline",), "decide: baseline would be compared with itself; name another experiment"),
        (("experiment=other", "decide={against: [othr]}"), "decide.against: there is no experiment 'othr'; did you"),
        (
            ("experiment=other", "decide={against: [other-random]}"),
            "decide.against: other selects no rows, so other-random would be baseline itself",
        ),
        ((), "decide: the key experiment is missing; name one, as in `snakemake decide --config"),
        (("experiment=other", "seeds=[0,1,2]", "decide={seeds: 2}"), "raise it to at least 3"),
        (("experiment=other", "report={headline: attribute_accuracy}"), "attribute_accuracy is not reported by"),
    ],
)
def test_undecidable_settings_are_refused(quick, monkeypatch, config, sentence):
    monkeypatch.chdir(quick.folder)
    with pytest.raises(InputError, match=re.escape(sentence)):
        check_decidable(Runs(parse_config([*SMALL, *config]), find_variant_sources()))


def test_snakemake_refuses_undecidable_settings_before_any_run(quick):
    printed = decide(quick, "decide={against: []}", ok=False)
    assert "decide.against: " in printed and "Traceback" not in printed and "done in" not in printed
    assert "would be compared with itself" in decide(quick, experiment="baseline", ok=False)
    printed = decide(quick, experiment="othr", ok=False)
    assert "experiment: there is no experiment 'othr'; did you mean 'other'?" in re.sub(r"\s+", " ", printed)
    assert "Traceback" not in printed and "done in" not in printed
