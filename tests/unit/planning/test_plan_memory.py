"""plan_memory.py on the command line, with a tiny model and fictional machines."""

import re

import pytest
import torch

import plan_memory
from dj2mgm.planning.architecture import find_architecture
from dj2mgm.planning.plan_table import explain_choice
from dj2mgm.planning.prediction import TrainingPlan, ZeroConfig
from dj2mgm.planning.search import Candidate
from dj2mgm.storage.files import read_yaml
from paths import PROJECT
from plan_memory import read_deepspeed_config
from run_main import Outcome, run_main
from tiny_models import mgm_config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Make a folder that contains only an MGM's configuration."""
    folder = tmp_path_factory.mktemp("model")
    mgm_config().save_pretrained(folder)
    return folder


@pytest.fixture
def plan(model, monkeypatch, capsys):
    """Plan the tiny model with these settings."""

    def run(*words: str) -> Outcome:
        defaults = (f"model={model}", "sequence=40", "micro_batch=2")
        by_key = {word.partition("=")[0]: word for word in (*defaults, *words)}
        return run_main(plan_memory, *by_key.values(), capture=capsys)

    monkeypatch.chdir(PROJECT)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it, and the plan would have this width
    return run


def test_one_screen_shows_all_tunings_and_configurations(plan):
    done = plan("gpus=2", "gpu_gib=24", "host_gib=64")
    assert done.status == 0, done.stderr
    assert "Machine: 2 × 24.00 GiB of GPU memory, 64.00 GiB of host memory" in done.stdout
    assert "No minutes are predicted, because no GPU is named. gpu=<name> plans for a card: rtx-3090, " in done.stdout
    for tuning in ("stage1", "lora", "full"):
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"│ {tuning} ")]
        assert len(rows) < len(list((PROJECT / "config/deepspeed").glob("*.json"))), "equal ones share a row"
        assert sum("chosen" in row for row in rows) == 1
    assert "zero3_offload_resident" in done.stdout
    assert [len(re.findall(f"^  {part} .* = ", done.stdout, flags=re.MULTILINE)) for part in ("GPU", "host")] == [3, 3]
    assert len(done.stdout.splitlines()) < 60


def test_the_answer_and_the_next_commands_come_first(plan):
    flags = ["gpu=rtx-4090", "deepspeed=[zero2]", "global_batch=64", "pretrain_batch=64"]
    lines = plan(*flags, "next=[\"snakemake -n baseline --config 'benchmarks=[mme]'\"]").stdout.splitlines()
    assert lines[0].startswith("It fits: ") and lines[0].endswith(", stage1 and lora")
    assert [line[2:15].strip() for line in lines[1:6]] == ["time", "GPU memory", "main memory", "disk", "next"]
    assert lines[5].endswith(" snakemake -n baseline --config 'benchmarks=[mme]'")
    assert re.search(r" about (\d+) minutes? for one experiment", lines[1])
    assert sum(line.startswith("Layers: computed twice") for line in lines) == 1


def test_the_default_batch_consists_of_the_stated_micro_batches(plan):
    """32 on 8 GPUs are more than the default of 128."""
    flags = ["gpu=h100", "gpus=8", "host_gib=500", "tunings=[lora]"]
    assert "32 × 1" in plan(*flags, "micro_batch=32", "deepspeed=[zero2]").stdout


def test_a_terminal_of_80_columns_shows_a_line_for_each_plan(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = plan("gpu=rtx-3090", "desktop_gib=0", "host_gib=8", "tunings=[full]")
    assert "1 × 23.68 GiB of GPU memory, 8.00 GiB of host memory" in " ".join(done.stdout.split())
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    rows = [line for line in done.stdout.splitlines() if line.startswith(" full ")]
    assert {row.split()[-1] for row in rows} <= {"fits", "chosen", "big"}


def test_one_plan_of_usual_rows_has_its_minutes(model, plan, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    flags = [f"model={model}", "max_length=2048", "deepspeed=[zero2]", "gpu=rtx-4090"]
    done = run_main(plan_memory, *flags, "samples={finetune: 1000}", "held_out=5", capture=capsys)
    text = " ".join(done.stdout.split())
    assert "with 64 (stage1) or 448 (lora, full) tokens of text in addition to an image" in text
    assert "Rows of max_length (2,048 tokens) fit, too" in text
    assert text.count("Chosen: zero2, micro batch ") == 3 and text.count("the fastest that fits.") == 3
    assert re.search(r"^ finetune +1,000 samples +[\d.]+ +[\d.]+ *$", done.stdout, flags=re.MULTILINE)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_the_reason_names_rounded_states():
    def rate(name: str, speed: float) -> Candidate:
        zero = ZeroConfig.from_deepspeed(read_deepspeed_config(name, 64))
        return Candidate(TrainingPlan(name, zero, 0, 8, 16), None, speed, None)

    exact, rounded = rate("zero2", 10.0), rate("adamw_8bit", 11.0)
    assert "adamw_8bit would be 10% faster, but rounds them to 8 bits" in explain_choice(exact, [exact, rounded])
    assert explain_choice(exact, [exact]).endswith("the fastest that fits.")
    assert "No plan with exact optimizer states fits" in explain_choice(rounded, [rounded])


def test_each_of_two_nodes_has_half_of_the_processes(plan):
    flags = ["gpus=4", "gpu_gib=24", "host_gib=64", "tunings=[full]"]
    one_node, two_nodes = plan(*flags), plan(*flags, "nodes=2")
    assert "64.00 GiB of host memory on each of 2 nodes" in two_nodes.stdout
    [host_of_one], [host_of_two] = (re.findall(r"  host ([\d.]+) GiB", done.stdout) for done in (one_node, two_nodes))
    assert float(host_of_two) == pytest.approx(float(host_of_one) / 2, rel=0.01)


def test_layers_are_compiled_unless_the_plan_says_otherwise(plan):
    flags = ["gpus=1", "gpu_gib=24", "host_gib=64", "tunings=[full]", "deepspeed=[zero2]"]
    default, plain = plan(*flags), plan(*flags, "compile=false")
    assert "compiler" in default.stdout and plain.status == 0 and "compiler" not in plain.stdout


def test_frozen_layers_in_4_bits_need_less_memory(plan):
    flags = ["model=mgm-2b", "sequence=1024", "gpus=1", "gpu_gib=80", "host_gib=64"]
    flags += ["tunings=[lora]", "deepspeed=[zero2]"]
    default, nf4, fp32 = plan(*flags), plan(*flags, "precision=nf4"), plan(*flags, "precision=fp32")
    [used_by_default], [used_by_nf4], [used_by_fp32] = (
        [float(size) for size in re.findall(r"  GPU ([\d.]+) GiB", done.stdout)] for done in (default, nf4, fp32)
    )
    assert used_by_nf4 < used_by_default < used_by_fp32


def test_lora_trains_no_projector_without_stage_1(monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    flags = ["model=smolvlm2-256m", "gpu=rtx-4090", "deepspeed=[zero2]", "micro_batch=1"]
    flags += ["sequence=2048", "tunings=[lora]"]
    done = run_main(plan_memory, *flags, capture=capsys)
    [trained] = re.findall(r", lora: ([\d.]+) of ", done.stdout)
    assert float(trained) < 5 and done.stdout.startswith("It fits: smolvlm2-256m, lora\n")


def test_remedies_replace_the_next_command_if_nothing_fits(plan):
    flags = ["gpu_gib=0.1", "host_gib=64", "tunings=[lora]", "next=[snakemake a]"]
    done = plan("gpus=1", *flags)
    assert done.stdout.startswith("It does not fit (what would help stands below the table): ")
    assert "snakemake a" not in done.stdout
    assert "Nothing fits. What would help:" in done.stdout
    assert "GiB of the GPU's memory instead of 0.1" in done.stdout
    done = plan("gpus=0", "host_gib=0.1", "tunings=[lora]", "notes=[Few rows.]")
    start = done.stdout.partition("DeepSpeed")[0]
    assert "next         add gpu=<name> to --config to plan for a card" in start and "Few rows." in start


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("max_length=40", "max_length: sequence states the planned length; leave out one of the two keys"),
        ("sequence=10", "sequence 10: an image alone takes 16 tokens. Raise it"),
        ("micro_batch=0", "the command line: micro_batch: expected an integer from 1 to 65536 or null, found 0"),
        ("gpus=-1", "the command line: gpus: expected an integer from 0 to 1024 or null, found -1"),
        ("lora={r: 99999999}", "the command line: lora.r: expected an integer from 1 to 65536, found 99999999"),
        (
            "precision=nf4 deepspeed=[zero3_offload]",
            "precision: nf4 needs whole weights, but zero3_offload partitions them; set deepspeed: [zero2]",
        ),
        ("precision=fp8 tunings=[full]", "precision: fp8 is for frozen layers, and the tuning full trains"),
        ("gpus=0 gpu_gib=22", "gpu_gib: the plan is for the CPU (gpus: 0); leave out one of the two keys"),
        ("gpu_gib=0", "the command line: gpu_gib: expected a number above 0 or null, found 0"),
        ("gpu_gib=24GB", "the command line: gpu_gib: expected a number above 0 or null, found '24GB'"),
        ("lora={targets: [q_projj]}", "lora.targets: the language model has no projection 'q_projj'; known are"),
        ("deepspeed=[zero9]", "deepspeed: there is no config/deepspeed/zero9.json"),
        ("gpus=1 gpu_gib=24 global_batch=1", "a global batch of 1 on 1 GPU cannot be"),
        ("24", "the command line: '24': expected <key>=<value>"),
    ],
)
def test_an_error_is_reported_in_one_sentence(plan, words, message):
    done = plan(*re.split(" (?=[a-z_]+=)", words))
    assert done.status == 2 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "billions"),  # values of the hub
    [
        ("HuggingFaceTB/SmolVLM2-256M-Video-Instruct", 0.256484928),
        ("OpenGVLab/InternVL3_5-1B-HF", 1.060897792),
        ("llava-hf/llava-1.5-7b-hf", 7.06),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("Qwen/Qwen3-VL-2B-Instruct", 2.13),
                ("Qwen/Qwen3-VL-4B-Instruct", 4.438),
                ("Qwen/Qwen2.5-VL-3B-Instruct", 3.75),
                ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2.25),
                ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 0.507482304),
                ("OpenGVLab/InternVL3_5-2B-HF", 2.35),
                ("google/gemma-3-4b-it", 4.300079472),
                ("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", 0.894),
                ("google/paligemma2-3b-pt-224", 3.03),
            )
        ),
    ],
)
def test_missing_models_are_planned_by_their_shape(model, billions):
    architecture = find_architecture(model)
    parameters = architecture.build(torch.bfloat16).parameters()
    assert sum(parameter.numel() for parameter in parameters) / 1e9 == pytest.approx(billions, rel=0.005)
    assert architecture.image_tokens > 250


@pytest.mark.parametrize("name", [path.stem for path in sorted((PROJECT / "config/models").glob("[!t]*.yaml"))])
def test_every_shipped_model_is_planned_offline(name, monkeypatch):
    """Plan the models in config/models, except for the tiny ones, whose parts come with the repository."""
    monkeypatch.chdir(PROJECT)
    settings = read_yaml(PROJECT / f"config/models/{name}.yaml").get("settings", {})
    max_length = settings.get("finetune", {}).get("max_length", 2048)
    assert 0 < find_architecture(name).image_tokens < max_length
