"""Runs: seeds, folders, and shared stages of experiments."""

import copy
import json
import os
import re
from pathlib import Path

import pytest
import yaml
from snakemake.cli import parse_config

from dj2mgm.errors import InputError, UnsuitableDatasetError
from dj2mgm.recipes.catalogue import INSTRUCTION_OPERATOR
from dj2mgm.runs import experiment_recipes as recipes
from dj2mgm.runs import layers
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import Variant, VariantSource
from dj2mgm.runs.pages import build_page_settings, list_page_experiments, list_page_files
from dj2mgm.runs.stages import STAGES, Run
from dj2mgm.settings.configuration import TARGETS_BY_KEY
from dj2mgm.settings.targets import FOLDERS, RESERVED_NAMES, RULES
from dj2mgm.settings.validation import Layer
from dj2mgm.storage.files import read_yaml, write_yaml
from forked_snakemake import run_snakemake
from paths import PROJECT
from source_files import PAIR


def find_run(runs: Runs, name: str) -> Run:
    """Return a run by its name, such as baseline/seed-1."""
    experiment, _, seed = name.partition("/seed-")
    return runs.get(experiment, int(seed)) if seed else runs.first_seed(experiment)


def owners(runs: Runs, name: str) -> dict[str, str]:
    """Return the name of the owner of each stage of a run."""
    run = find_run(runs, name)
    return {stage: runs.reuse.find_owner(run, stage).name for stage in run.settings}


def test_only_later_seeds_have_folders_of_their_own(write):
    runs = Runs({"seeds": [3, 5]})
    assert [run.name for run in runs if run.experiment == "baseline"] == ["baseline", "baseline/seed-5"]
    assert (runs.first_seed("baseline").seed, runs.get("baseline", 5).seed) == (3, 5)
    assert runs.get("baseline", 5).settings["pretrain"].seed == 5


DIFFERENCES = [  # settings, and stages of their own
    ({"description": "nothing"}, []),
    ({"finetune": {"lora": {"r": 4}}}, ["finetune", "generate", "evaluate_clip", "evaluate_vqa"]),
    ({"pretrain": {"epochs": 2}}, ["pretrain", "finetune", "generate", "evaluate_clip", "evaluate_vqa"]),
    ({"evaluate": {"clip_prompt": "A drawing of "}}, ["evaluate_clip"]),
    ({"evaluate": {"judge_clip": "a/judge"}}, ["evaluate_clip"]),
    ({"evaluate": {"second_judge": "a/judge"}}, ["evaluate_clip"]),
    ({"without": ["image_text_deduplicator"]}, [stage for stage in STAGES if stage != "synthesize"]),
    ({"synthesize": {"recipe": "dj_synth"}}, [stage for stage in STAGES if stage != "filter"]),
    ({"dataset": "."}, [stage for stage in STAGES if stage != "synthesize"]),
]


def test_stages_before_the_first_difference_are_shared(write, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(PAIR)
    for number, (change, _) in enumerate(DIFFERENCES):
        write(f"mine{number}", **change)
    runs = Runs({})
    for number, (change, own) in enumerate(DIFFERENCES):
        folders = owners(runs, f"mine{number}")
        expected = [stage for stage in own if stage in folders]
        assert [stage for stage, folder in folders.items() if folder != "baseline"] == expected, change


def test_selecting_instructions_repeats_no_stage_1(write):
    write(synthesize={"recipe": "dj_synth_instructions"})
    write("random", jsonl={"same_size_as": "mine"})
    runs = Runs({})
    own = [stage for stage, owner in owners(runs, "mine").items() if owner == "mine"]
    assert own == ["synthesize", "jsonl", "finetune", "generate", "evaluate_clip", "evaluate_vqa"]
    assert owners(runs, "random")["pretrain"] == "baseline"
    run = runs.first_seed("mine")
    assert runs.find_captioner_folder(run) == "results/shapes/tiny/baseline/finetune"
    assert run.settings["synthesize"].captioner.template["name"] != "plain"


def test_other_amounts_of_instructions_repeat_no_stage_1(write, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(PAIR)
    (tmp_path / "asked.json").write_text("[]")
    sources = {name: {"format": "data_juicer", "path": "pairs.jsonl"} for name in ("photos", "charts")}
    sources["asked"] = {"format": "llava", "path": "asked.json", "split": "finetune"}
    write_yaml(tmp_path / "config/datasets/several.yaml", {"sources": sources})
    write(dataset="several", sources={"asked": 0.5})
    write("charts", dataset="several", sources={"charts": 0.5})
    write("sampled", dataset="several", sources={"asked": 0.5}, jsonl={"same_size_as": "charts"})
    runs = Runs({"dataset": "several"})
    for name, shared in {"mine": {"filter", "pretrain"}, "charts": {"filter"}, "sampled": {"filter"}}.items():
        assert {stage for stage, owner in owners(runs, name).items() if owner == "baseline"} == shared


def test_operators_for_instructions_need_their_rows(write, tmp_path):
    text = (tmp_path / "config/recipes/dj_synth_instructions.yaml").read_text(encoding="utf-8")
    recipe = tmp_path / "config/recipes/pairs.yaml"
    recipe.write_text(text.replace("rows: instructions", "rows: pairs"), encoding="utf-8")
    write("all", synthesize={"recipe": "pairs"})
    write("checks", synthesize={"recipe": "pairs"}, without=["instruction_synthesis_mapper", "round_trip_filter"])
    errors = Runs({}).experiments.errors
    assert "instruction_synthesis_mapper reads questions" in str(errors["all"])
    assert "caption_agreement_filter reads questions" in str(errors["checks"])


UNSUITABLE = [  # step of a recipe for instructions, captioner, and problem
    ({"low_similarity_recaption_mapper": {"keep_fraction": 0.5}}, "openai", "would replace the answers of instruc"),
    ({"instruction_synthesis_mapper": {}}, "blip2", "blip2 answers no questions, which instruction_synthesis_map"),
    ({"vlm_rating_filter": {}}, "blip2", "blip2 answers no questions, which vlm_rating_filter needs"),
    ({"instruction_synthesis_mapper": {"questions": "dataset"}}, "openai", "openai cannot answer questions of the"),
    (
        {"likelihood_gain_filter": {"base_model": "results/models/x", "stage": "results/x"}},
        "openai",
        "likelihood_gain_filter: template plain leaves questions out",
    ),
    (
        {"blind_answer_filter": {"base_model": "results/models/y", "stage": "results/x"}},
        "openai",
        "found 'results/models/y'. Run the experiment that writes it first",
    ),
]


def test_operators_need_a_suitable_captioner(write, tmp_path):
    for folder in ("results/models/x", "results/x"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").touch()
    for number, (step, captioner, _) in enumerate(UNSUITABLE):
        write_yaml(tmp_path / f"config/recipes/asked{number}.yaml", {"rows": "instructions", "process": [step]})
        synthesis = {"recipe": f"asked{number}", "captioner": captioner, "openai": {"model": "m"}}
        write(f"mine{number}", synthesize=synthesis)
    errors = Runs({}).experiments.errors
    for number, (step, _, problem) in enumerate(UNSUITABLE):
        assert re.search(problem, str(errors[f"mine{number}"])), step


def test_a_recipe_for_given_instructions_needs_some(write, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(PAIR)
    write_yaml(
        tmp_path / "config/recipes/model.yaml", {"rows": "instructions", "process": [{INSTRUCTION_OPERATOR: {}}]}
    )
    write("given", synthesize={"recipe": "dj_synth_instructions"})
    write("written", synthesize={"recipe": "model"})
    errors = Runs({"dataset": "pairs.jsonl"}).experiments.errors
    assert isinstance(errors["given"], UnsuitableDatasetError)
    assert "the dataset pairs has no instructions, which this recipe needs" in str(errors["given"])
    assert "written" not in errors and "baseline" not in errors
    assert "given" not in Runs({}).experiments.errors


def test_a_page_reads_the_leaks_of_its_search(write, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/pairs.jsonl").write_text(PAIR)
    write(dataset="photos")
    runs = Runs({})
    assert [entry["leaks"] for entry in build_page_settings(runs, ["baseline", "mine"])["experiments"]] == [
        None,
        "results/datasets/photos/leaks",
    ]
    assert [file for file in list_page_files(runs, ["baseline", "mine"]) if "leaks" in file] == [
        f"results/datasets/photos/leaks/{name}" for name in ("leaks.jsonl", "summary.json")
    ]


def test_seeds_share_filtering_but_not_training(write):
    folders = owners(Runs({"seeds": [0, 1]}), "dj_synth/seed-1")
    assert folders["filter"] == "baseline"
    assert {folder for stage, folder in folders.items() if stage != "filter"} == {"dj_synth/seed-1"}


def test_captions_depend_on_the_captioner_of_the_same_seed(write):
    server = {"recipe": "dj_synth", "captioner": "openai", "openai": {"model": "some/model"}}
    write("blip", synthesize={"recipe": "dj_synth", "captioner": "blip2"})
    write("server", synthesize=server)
    write("no_captions", synthesize={"recipe": "dj_synth"}, without=["low_similarity_recaption_mapper"])
    runs = Runs({"seeds": [0, 1]})
    run = runs.get("dj_synth", 1)
    assert (run.captioner, runs.find_stage_folder(runs.get(run.captioner, run.seed), "pretrain")) == (
        "baseline",
        "results/shapes/tiny/baseline/seed-1/pretrain",
    )
    assert [runs.first_seed(name).captioner for name in ("blip", "server", "no_captions")] == [None] * 3
    assert runs.first_seed("server").settings["synthesize"].captioner.model == "some/model"


def test_a_recipes_own_captioner_replaces_the_model(write, tmp_path):
    recipe = yaml.safe_load((tmp_path / "config/recipes/dj_synth.yaml").read_text(encoding="utf-8"))
    recipe["process"][0]["low_similarity_recaption_mapper"]["captioner"] = {
        "image_captioning_mapper": {"hf_img2seq": "results/blip2", "keep_original_sample": False}
    }
    (tmp_path / "results/blip2").mkdir(parents=True)
    (tmp_path / "results/blip2/model.safetensors").touch()
    (tmp_path / "config/recipes/own.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    write(synthesize={"recipe": "own"})
    runs = Runs({})
    run = runs.first_seed("mine")
    assert (run.settings["synthesize"].captioner, runs.find_captioner_folder(run)) == (None, None)


def test_the_reference_has_the_seeds_of_all_on_a_page(write):
    write(finetune={"lora": {"r": 4}}, seeds=[0, 2])
    page = build_page_settings(Runs({}), ["baseline", "mine"])
    seeds = {experiment["name"]: [run["seed"] for run in experiment["runs"]] for experiment in page["experiments"]}
    assert seeds == {"baseline": [0, 2], "mine": [0, 2]}
    [first, second] = page["experiments"][1]["runs"]
    assert first["stages"]["pretrain"] == "results/shapes/tiny/baseline/pretrain"
    assert second["stages"]["pretrain"] == "results/shapes/tiny/baseline/seed-2/pretrain"
    assert second["stages"]["finetune"] == "results/shapes/tiny/mine/seed-2/finetune"


def test_settings_of_other_targets_leave_the_report_as_it_is(write):
    write(finetune={"lora": {"r": 4}})
    page = build_page_settings(Runs({}), ["baseline", "mine"])
    values = {"publish": {"repository": "me/model"}, "format": "dj", "experiment": "mine", "fetch": {"rows": 9}}
    assert build_page_settings(Runs(values), ["baseline", "mine"]) == page
    assert not [key for entry in page["experiments"] for key in TARGETS_BY_KEY if key in entry["config"]]


def test_a_random_subset_depends_on_the_size_of_its_experiment(write):
    selecting = {"recipe": "mine"}
    Path("config/recipes/mine.yaml").write_text(
        yaml.safe_dump({"process": [{"image_integrity_filter": {}}, {"words_num_filter": {"max_num": 14}}]}),
        encoding="utf-8",
    )
    write(**selecting, controls=["random"], finetune={"lora": {"r": 4}})
    runs = Runs({"seeds": [0, 1]})
    assert list_page_experiments(runs, "mine/report") == ["baseline", "mine", "mine-random"]
    run, parent = (runs.get(name, 1) for name in ("mine-random", "mine"))
    assert run.settings["filter"] == runs.first_seed("baseline").settings["filter"] != parent.settings["filter"]
    assert {stage: values for stage, values in run.settings.items() if stage != "filter"} == {
        stage: values for stage, values in parent.settings.items() if stage != "filter"
    }
    folders = owners(runs, "mine-random/seed-1")
    assert folders.pop("filter") == "baseline" and set(folders.values()) == {"mine-random/seed-1"}
    entries = build_page_settings(runs, ["baseline", "mine", "mine-random"])["experiments"]
    control = {"kind": "random", "experiment": "mine", "compared": ["mine", "mine-random"]}
    assert [entry.get("control") for entry in entries] == [None, None, control]


def test_a_verdict_is_repeated_at_half_the_learning_rates(write):
    rates = {"pretrain": {"learning_rate": 4e-3}, "finetune": {"projector_learning_rate": 2e-5}}
    write(**rates, seeds=[0, 3], controls=["half_learning_rate"])
    runs = Runs({})
    names = list_page_experiments(runs, "mine/report")
    assert names == ["baseline", "mine", "baseline-half-learning-rate", "mine-half-learning-rate"]
    for parent, name in zip(names[:2], names[2:], strict=True):
        before, after = (runs.first_seed(experiment).config for experiment in (parent, name))
        assert after.pretrain.learning_rate == before.pretrain.learning_rate / 2
        assert after.finetune.learning_rate == before.finetune.learning_rate / 2
        assert owners(runs, name)["jsonl"] in ("baseline", "mine")
    assert after.finetune.projector_learning_rate == 1e-5
    entries = build_page_settings(runs, names)["experiments"]
    assert [[run["seed"] for run in entry["runs"]] for entry in entries] == [[0, 3]] * 4
    assert [entry["control"]["compared"] for entry in entries[2:]] == [None, [names[3], names[2]]]


def test_the_command_line_can_request_controls_of_all(write):
    runs = Runs({"controls": ["random"]})
    assert list_page_experiments(runs, "report") == ["baseline", "dj_synth", "dj_synth-random"]
    folders = owners(runs, "dj_synth-random")
    assert folders.pop("filter") == "baseline" and set(folders.values()) == {"dj_synth-random"}
    assert "synthesize" not in runs.first_seed("dj_synth-random").settings


def test_a_report_may_hold_an_experiment_that_selects_no_rows(write):
    write(finetune={"lora": {"r": 4}})
    runs = Runs({"controls": ["random"], "report": {"experiments": ["baseline", "dj_synth", "mine"]}})
    assert list_page_experiments(runs, "report") == ["baseline", "dj_synth", "dj_synth-random", "mine"]
    runs.experiments.require("mine")
    alone = Runs({"controls": ["random"], "report": {"experiments": ["baseline", "mine"]}})
    with pytest.raises(InputError, match="controls: random"):
        alone.experiments.require("mine")


def test_impossible_controls_are_refused(write):
    cases = {
        "a": ({"controls": ["random"]}, "controls: random: the recipes drop no other rows than those of baseline"),
        "b": ({"jsonl": {"same_size_as": "nosuch"}}, "jsonl.same_size_as: there is no experiment 'nosuch'"),
        "c": ({"jsonl": {"same_size_as": "c"}}, "one that uses all its rows"),
        "d": ({"jsonl": {"fraction": {"a": 0.5}}}, "the dataset shapes has no source 'a'; it has one source only"),
    }
    for name, (values, _) in cases.items():
        write(name, **values)
    runs = Runs({})
    for name, (_, message) in cases.items():
        with pytest.raises(InputError, match=message):
            runs.experiments.require(name)


def test_a_part_of_lora_completes_after_lora_null(write):
    write(finetune={"lora": None})
    runs = Runs({"finetune": {"lora": {"r": "8"}}})
    loras = [runs.first_seed(name).settings["finetune"].lora for name in ("mine", "baseline")]
    assert loras[0] == loras[1] and loras[0].r == 8
    assert Runs({}).first_seed("mine").settings["finetune"].lora is None


def test_an_error_names_the_experiment_and_the_key(write):
    cases = {
        "a": ({"recipe": "nosuch"}, "recipe: there is no config/recipes/nosuch.yaml; known are baseline"),
        "b": ({"synthesize": {"recipe": "nosuch"}}, "synthesize.recipe: there is no config/recipes/nosuch"),
        "c": ({"without": ["text_lenght_filter"]}, "without: no recipe of this experiment has the operator"),
        "d": (
            {"synthesize": {"recipe": "dj_synth", "mgm": {"experiment": "base"}}},
            "synthesize.mgm.experiment: there is no experiment 'base'; did you mean 'baseline'?",
        ),
        "e": (
            {"synthesize": {"recipe": "dj_synth", "mgm": {"experiment": "e"}}},
            "synthesize.mgm.experiment: e → e is a cycle",
        ),
        "f": (
            {"model": "mgm-2b", "synthesize": {"recipe": "dj_synth"}},
            "synthesize.mgm.experiment: baseline trains tiny, not mgm-2b; name an experiment",
        ),
        "g": (
            {"synthesize": {"recipe": "dj_synth", "captioner": "openai"}},
            "synthesize.openai.model is not set: name a model of http://localhost:8000/v1/models",
        ),
    }
    cases["h"] = {"recipe": "dj_synth_instructions"}, "name it in synthesize.recipe"
    for name, (values, _) in cases.items():
        write(name, **values)
    errors = Runs({}).experiments.errors
    for name, (_, message) in cases.items():
        assert message in str(errors[name]) and (name == "e" or f"experiment {name}: " in str(errors[name]))


def test_an_unknown_experiment_lists_the_known_ones(write):
    for settings in ({"report": {"experiments": ["nosuch"]}}, {"experiment": "nosuch"}, {"experiment": ["nosuch"]}):
        with pytest.raises(InputError, match="experiments?: there is no experiment 'nosuch'; known are baseline"):
            Runs(settings)


def write_text(name: str, text: str) -> Path:
    path = Path(f"config/experiments/{name}.yaml")
    path.write_text(text, encoding="utf-8")
    return path


def test_a_bad_experiment_file_fails_its_own_targets(write):
    texts = ("gpus: [1", "nonsense: 1", "dataset: nowhere", "gpus: 010", "recipe: nosuch", "gpus: 1\ngpus: 2")
    names = [f"bad{number}" for number, _ in enumerate(texts)]
    for name, text in zip(names, texts, strict=True):
        write_text(name, text)
    runs = Runs({"report": {"experiments": ["baseline", *names]}})
    assert not {*names} & {*runs.experiments.names, *(run.experiment for run in runs)}
    build_page_settings(runs, ["baseline", "dj_synth"])
    for name in names:
        with pytest.raises(InputError, match=name):
            runs.experiments.require(name)
    with pytest.raises(InputError, match="bad"):
        build_page_settings(runs, runs.shared.report.experiments)


class OneVariant(VariantSource):
    """A target with one variant, whose name a later step of the target may plan."""

    def __init__(self, name: str, experiment: str, late: bool = False):
        super().__init__(name, f"config/{name}.yaml")
        self.experiment, self.late = experiment, late

    def read(self, experiments):
        experiments.check_experiments([self.experiment], self.file)

    @property
    def late_names(self):
        return f"{self.experiment}-short"

    def list_variants(self, experiments):
        experiments.require(self.experiment)
        changes = {"finetune": {"max_steps": 7}}
        variant = Variant(f"{self.experiment}-short", self.experiment, self.file, changes)
        return [] if self.late else [variant]


def test_a_source_adds_variants_and_their_target(write):
    write("mine", finetune={"epochs": 2.0})
    runs = Runs({}, [OneVariant("compared", "mine")])
    assert runs.experiments.variant_names["compared"] == ["mine-short"]
    assert runs.first_seed("mine-short").settings["finetune"].max_steps == 7
    assert runs.by_folder("shapes/tiny/mine-short").config.finetune.epochs == 2


def test_a_late_variant_is_found_when_its_run_is_needed(write):
    source = OneVariant("compared", "baseline", late=True)
    runs = Runs({}, [source])
    with pytest.raises(InputError, match="results/shapes/tiny/baseline-short: no target has planned this variant"):
        runs.by_folder("shapes/tiny/baseline-short")
    source.late = False
    assert runs.by_folder("shapes/tiny/baseline-short").settings["finetune"].max_steps == 7


@pytest.mark.parametrize("name", ["mine", "Mine", "mine-short"])
def test_a_source_cannot_have_a_used_name(write, name):
    write("mine", finetune={"epochs": 2.0})
    runs = Runs({}, [OneVariant("compared", "mine"), OneVariant(name, "baseline")])
    assert f"config/{name}.yaml: " in str(list(runs.experiments.errors.values())) and "rename" in str(
        runs.experiments.errors
    )


def test_dependents_of_a_bad_experiment_fail_with_its_message(write):
    write_text("bad", "nonsense: 1")
    write("mine", synthesize={"recipe": "dj_synth", "mgm": {"experiment": "bad"}})
    runs = Runs({}, [OneVariant("compared", "bad")])
    for target in ("mine", "compared"):
        with pytest.raises(InputError, match="config/experiments/bad.yaml: nonsense: unknown key"):
            runs.experiments.require(target)


@pytest.mark.parametrize("spoil", ["config/config.yaml", "config/experiments/baseline.yaml"])
def test_an_error_in_the_defaults_is_raised_immediately(write, spoil):
    Path(spoil).write_text("gpus: [1", encoding="utf-8")
    with pytest.raises(InputError, match=f"{spoil}, line "):
        Runs({})
    Path(spoil).write_text("", encoding="utf-8")
    if spoil == "config/config.yaml":
        with pytest.raises(InputError, match="config/config.yaml is empty; it must state the default of every key"):
            Runs({})


def test_names_of_experiments_are_checked(write):
    invalid = ("my exp", "-x", "x-", "x..", "ä", "a'b", "{x}", "x" * 101, "$(date)")
    reserved = ("plan", "doctor", "Report", "datasets", "captions", "filter_data", "finetune_minimal")
    valid = ("123", "a.b", "seed-3", "x_y-z", "A")
    paths = {name: write_text(name, "description: mine") for name in (*invalid, *reserved, "Baseline", *valid)}
    Path("config/experiments/.#baseline.yaml").symlink_to("nowhere")
    write_text(".mine", "x: [")  # hidden files of editors are no experiments
    runs = Runs({})
    errors = {name: str(error) for name, error in runs.experiments.errors.items()}
    assert errors.keys() == {*invalid, *reserved, "Baseline"}
    assert all(errors[name].startswith(f"{paths[name]}: an experiment's file must be a name") for name in invalid)
    assert all(f"{paths[name]}: {name} is a rule or a folder" in errors[name] for name in reserved)
    assert "cannot tell Baseline and baseline apart" in errors["Baseline"]
    assert {runs.first_seed(name).config.description for name in valid} == {"mine"}


def test_the_rules_of_the_parsed_workflow_are_reserved():
    rules = run_snakemake(["--list-rules"], PROJECT, dict(os.environ)).stdout.split()
    targets = {path.stem for kind in ("experiments", "studies") for path in (PROJECT / "config" / kind).glob("*.yaml")}
    assert set(rules) - targets == RULES and not targets & RESERVED_NAMES


def test_the_folders_of_results_in_rules_are_reserved():
    files = [PROJECT / "Snakefile", *(PROJECT / "rules").rglob("*.smk")]
    texts = "".join(path.read_text(encoding="utf-8") for path in files)
    assert {*re.findall(r"results/(\w+)", texts)} - RULES == FOLDERS - {"report"}  # below a model's folder
    assert all(name.islower() for name in RESERVED_NAMES)


def test_a_repeated_dataset_name_fails_the_later_experiment(write, tmp_path):
    for parent in "ab":
        (tmp_path / parent / "fotos").mkdir(parents=True)
        (tmp_path / parent / "fotos/pairs.jsonl").write_text(PAIR)
    write("one", dataset="a/fotos")
    write("two", dataset="b/fotos")
    runs = Runs({})
    assert list(runs.experiments.errors) == ["two"]
    assert "one uses another dataset that is named fotos; rename the folder" in str(runs.experiments.errors["two"])


HOSTILE = ["../models/tiny", "{x}", "$(touch x)'", "010"]
HOSTILE += [pytest.param(text, marks=pytest.mark.slow) for text in ("a b", "x" * 5000, "-rf")]
FREE = ("description", "evaluate", "benchmarks", "challenge")  # strings that name nothing in config/


@pytest.mark.parametrize("text", HOSTILE)
def test_every_string_is_accepted_or_refused_in_one_sentence(write, monkeypatch, text):
    monkeypatch.setattr(layers, "read_config", cache_of_files(layers.read_config))
    Path("config/experiments/better_synth_10k.yaml").unlink()
    together = Layer("together", {})
    for path in find_string_keys(layers.build_schema(layers.Configuration)):
        value = text
        for key in reversed(path):
            value = [value] if key == "[]" else {key: value}
        try:
            if path[0] in FREE:
                layers.merge_shared_settings(value)
                together = Layer("together", layers.merge([together, Layer("", value)]))
            else:
                Runs(value)
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 12_000
    runs = Runs(together.values)
    contents = [stage.file_content() for run in runs for stage in run.settings.values()]
    json.dumps(contents, ensure_ascii=False).encode("utf-8")


def cache_of_files(read_config):
    """Return a function that reads each file once, because reading takes most of the time."""
    contents = {}

    def read(path, schema=None):
        key = path, id(schema)
        if key not in contents:
            contents[key] = read_config(path, schema)
        return copy.deepcopy(contents[key])

    return read


def find_string_keys(schema: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if "string" in schema.get("type", ()):
        return [path]
    keys = [key for name, part in schema.get("properties", {}).items() for key in find_string_keys(part, (*path, name))]
    return keys + (find_string_keys(schema["items"], (*path, "[]")) if "items" in schema else [])


def test_every_stage_has_a_rule_with_its_outputs():
    texts = [path.read_text(encoding="utf-8") for path in (PROJECT / "rules").rglob("*.smk")]
    rules = {block.split(":", 1)[0]: block for text in texts for block in re.split(r"^rule ", text, flags=re.M)[1:]}
    for name, stage in STAGES.items():
        made = rules[stage.rule]
        if f'list_training_records("{name}")' in made:  # all outputs in the table of stages
            continue
        for output in set(stage.outputs) - {"config.yaml"}:
            assert f'"results/{{run}}/{name}/{output}"' in made, (name, output)


def test_a_run_records_the_owners_of_shared_stages(write, tmp_path):
    write(finetune={"lora": {"r": 4}})
    runs = Runs({})
    for name in ("baseline", "mine"):
        (tmp_path / "results/shapes/tiny" / name).mkdir(parents=True)
    runs.reuse.write_notes(runs.iterate_with_results())
    folder = tmp_path / "results/shapes/tiny"
    notes = {path.parent.name: read_yaml(path)["same_as"] for path in folder.glob("mine/*/stage.yaml")}
    assert notes == {name: f"results/shapes/tiny/baseline/{name}" for name in ("filter", "jsonl", "pretrain")}
    write(finetune={"lora": {"r": 4}}, pretrain={"epochs": 2})
    runs = Runs({})
    runs.reuse.write_notes(runs.iterate_with_results())
    assert not (tmp_path / "results/mine/pretrain/stage.yaml").exists()


def test_seeds_share_checked_recipes_but_not_their_settings(write, monkeypatch):
    calls = []
    parse = recipes.parse_recipe
    monkeypatch.setattr(recipes, "parse_recipe", lambda *args, **kwargs: calls.append(args) or parse(*args, **kwargs))
    recipes._check.cache_clear()
    Runs({"seeds": [1]})
    once = len(calls)
    recipes._check.cache_clear()
    first, second = (run for run in Runs({"seeds": [1, 2]}) if run.experiment == "baseline")
    assert len(calls) == 2 * once
    assert first.settings["filter"].recipe == second.settings["filter"].recipe
    assert first.settings["filter"].recipe is not second.settings["filter"].recipe


@pytest.mark.parametrize("name", ["2024_10", "007", "1e3", "1_0", "0x10", "True", "nan", "-1", "1.50"])
def test_names_that_look_like_numbers_stay_as_they_are_written(tmp_path, name):
    """Snakemake reads `--config dataset=2024_10` as the number 202410."""
    names, number = ("dataset", "experiment", "model"), "gpus=2"
    arguments = [number, *(f"{key}={name}" for key in names)]
    values = layers.restore_texts(parse_config(arguments), arguments, [])
    assert layers.build_command_line_layer(values).values == dict.fromkeys(names, name) | {"gpus": 2}
    file = tmp_path / "config.yaml"
    file.write_text(f"dataset: {name}\nexperiment: other\ngpus: 2\n")
    read = yaml.safe_load(file.read_text()) | parse_config(arguments[2:])
    values = layers.restore_texts(read, arguments[2:], [file])
    assert layers.build_command_line_layer(values).values == dict.fromkeys(names, name) | {"gpus": 2}


@pytest.mark.parametrize("name", ["photos #2", "null", "~", "a: b", "[x]", "!x", "&a", "{a}", "- a", "photos"])
def test_names_that_yaml_reads_otherwise_stay_as_typed(name):
    arguments = [f"dataset={name}", f"model={name}"]
    assert layers.restore_texts(parse_config(arguments), arguments, []) == {"dataset": name, "model": name}


def test_a_null_stays_a_null_where_a_setting_may_be_null():
    assert layers.restore_texts({"experiment": None}, ["experiment=null"], []) == {"experiment": None}


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_names_of_the_command_line_may_have_quotes(quote):
    arguments = [f"dataset={quote}1e3{quote}", f"experiment={quote}007{quote}"]
    values = layers.restore_texts(parse_config(arguments), arguments, [])
    assert values == {"dataset": "1e3", "experiment": "007"}


def test_numbers_on_the_command_line_are_those_of_config_files():
    for argument in ("gpus=1_0", "gpus=010", "gpus=1e999"):
        with pytest.raises(InputError, match="gpus"):
            layers.build_command_line_layer(layers.restore_texts(parse_config([argument]), [argument], []))
