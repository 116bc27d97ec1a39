"""Measure whether merged LoRAs of single sources can stand in for models that are trained on mixtures of them.

    python benchmarks/merged_loras.py FOLDER           # FOLDER: a clone of the project; an hour on two cores
    python benchmarks/merged_loras.py FOLDER --tiny    # two mixtures of few rows, to try the script

Four sources of instructions about embedded scenes have wrong answers to 0, 30, 60 and 90 % of the questions. Stage 1 is
trained once, on clean captions. Stage 2 is trained on each source alone, and on eight mixtures. For each mixture, the
weights of the four models are merged: linearly, weighted by the shares, and by TIES (Yadav et al. 2023, arXiv
2306.01708). The script prints the headline of each trained and merged model, Spearman's correlation of both with its
95 % interval, and the share of pairs of mixtures that merging orders as training does.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy import stats

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "benchmarks")]

from mixture import NOISE, parse_folder, run_target  # noqa: E402

from dj2mgm.data.shapes import write_shapes  # noqa: E402
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset  # noqa: E402
from dj2mgm.evaluation.held_out_rows import HeldOutRows  # noqa: E402
from dj2mgm.evaluation.intervals import Estimate  # noqa: E402
from dj2mgm.features.studies.proxies import measure_agreement  # noqa: E402
from dj2mgm.models.generators import load_family, open_generators  # noqa: E402
from dj2mgm.settings.dataset_files import FaultRates  # noqa: E402
from dj2mgm.settings.evaluation import GenerateSettings  # noqa: E402
from dj2mgm.settings.validation import load_settings  # noqa: E402
from dj2mgm.storage.files import read_json, read_yaml, write_yaml  # noqa: E402

STUDY = "mixtures"
WRONG = NOISE  # share of wrong answers of each source
MIXTURES, KEPT = 8, 0.2  # number of mixtures, and share of each difference that TIES keeps
PAIRS, INSTRUCTIONS = 2500, 2500  # pairs of stage 1, and instructions of each source
Weights = dict[str, torch.Tensor]


def draw_mixtures(number: int) -> dict[str, dict[str, float]]:
    """Return shares of the sources by the name of the variant: each source alone, then random mixtures."""
    single = {name: {source: float(source == name) for source in WRONG} for name in WRONG}
    random_shares = np.random.default_rng(0).dirichlet(np.ones(len(WRONG)), number).round(3)
    random_mixtures = {
        f"mix{index}": dict(zip(WRONG, map(float, shares), strict=True)) for index, shares in enumerate(random_shares)
    }
    return single | random_mixtures


def write_inputs(folder: Path, mixtures: dict[str, dict[str, float]], pairs: int, instructions: int) -> None:
    """Write the sources and the study into a clone of the project."""
    embedded = resolve_dataset("shapes").settings
    sources: dict[str, dict] = {"pairs": {"format": "data_juicer", "path": "data/clean/pretrain.jsonl"}}
    for number, (name, wrong) in enumerate(WRONG.items()):
        changes = {"pretrain_pairs": pairs, "finetune_instructions": instructions, "wrong_instructions": wrong}
        changes |= {"seed": 100 + number, "fault_rates": FaultRates()}
        write_shapes(embedded.model_copy(update=changes), folder / "data" / name)
        sources[name] = {"format": "llava", "path": f"data/{name}/finetune.json", "split": "finetune"}
    evaluation = {"file": "data/clean/evaluation.jsonl", "images": "data/clean"}
    write_yaml(folder / "config/datasets/instructions.yaml", {"sources": sources, "evaluation": evaluation})
    variants = {
        name: {f"shares.{source}": share for source, share in shares.items()} for name, shares in mixtures.items()
    }
    design = {"kind": "list", "variants": variants}
    write_yaml(folder / f"config/studies/{STUDY}.yaml", {"experiment": "baseline", "controls": [], "design": design})
    write_yaml(folder / "config/recipes/all.yaml", {"process": [{"image_integrity_filter": {}}]})


def merge_linearly(base: Weights, models: list[Weights], shares: list[float]) -> Weights:
    """Return the mean of the models' weights, weighted by the shares."""
    return {
        name: sum(share * model[name].float() for share, model in zip(shares, models, strict=True)).to(base[name].dtype)
        for name in base
    }


def merge_by_ties(base: Weights, models: list[Weights], shares: list[float]) -> Weights:
    """Return the base with the merged differences: trimmed, and averaged where they have the sign of the majority."""
    merged = {}
    for name, start in base.items():
        differences = torch.stack([model[name].float() - start.float() for model in models])
        flat = differences.abs().flatten(1)
        count = max(1, round(KEPT * flat.shape[1]))
        limits = flat.kthvalue(flat.shape[1] - count + 1, dim=1).values
        trimmed = differences * (differences.abs() >= limits.view(-1, *[1] * start.dim()))
        weights = torch.tensor(shares).view(-1, *[1] * start.dim())
        sign = (weights * trimmed).sum(0).sign()
        agreeing = weights * (trimmed.sign() == sign)
        mean = (agreeing * trimmed).sum(0) / agreeing.sum(0).clamp_min(1e-9)
        merged[name] = (start.float() + mean).to(start.dtype)
    return merged


def measure_headline(model: Path, rows: HeldOutRows) -> float:
    """Return the mean probability of the right answer of a model without further stages."""
    with open_generators(model, 1) as load:
        return float(np.exp(list(rows.measure_answers(load(None)))).mean())


def main() -> None:
    folder, is_tiny = parse_folder(__doc__)
    mixtures = draw_mixtures(2 if is_tiny else MIXTURES)
    if not (folder / f"config/studies/{STUDY}.yaml").exists():  # newer files would run everything again
        write_inputs(folder, mixtures, *((100, 200) if is_tiny else (PAIRS, INSTRUCTIONS)))
    run_target(folder, STUDY, "dataset=instructions", "recipe=all")

    experiments = read_yaml(folder / f"results/instructions/tiny/{STUDY}/config.yaml")["experiments"]
    stages = {entry["name"].removeprefix("baseline-"): entry["runs"][0]["stages"] for entry in experiments}
    reference = stages["clean"]
    settings = load_settings(GenerateSettings, folder / reference["generate"] / "config.yaml")
    settings = settings.model_copy(update={"image_root": str(folder / settings.image_root)})
    rows = HeldOutRows(folder / "results/datasets/instructions/evaluation.jsonl", settings)
    family = load_family(folder / "results/models/tiny/mgm")
    model = family.load_trained_model(folder / reference["pretrain"], dtype="auto")  # takes the merged weights in turn
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    models = [family.load_trained_model(folder / stages[name]["finetune"], dtype="auto").state_dict() for name in WRONG]

    trained_scores: dict[str, float] = {}
    merged_scores: dict[str, dict[str, float]] = {"linear": {}, "TIES": {}}
    for name, shares in mixtures.items():
        groups = read_json(folder / stages[name]["evaluate_vqa"] / "metrics.json")["groups"]
        trained_scores[name] = Estimate(**groups["finetune/own"]["answer_probability"]).mean
        if name in WRONG:
            print(json.dumps({"source": name, "trained": trained_scores.pop(name)}), flush=True)
            continue
        for method, merge in (("linear", merge_linearly), ("TIES", merge_by_ties)):
            with tempfile.TemporaryDirectory() as merged_folder:
                model.load_state_dict(merge(base, models, list(shares.values())))
                model.save_pretrained(merged_folder)
                family.save_processor(Path(merged_folder))
                merged_scores[method][name] = measure_headline(Path(merged_folder), rows)
        figures = {method: scores[name] for method, scores in merged_scores.items()}
        print(json.dumps({"mixture": shares, "trained": trained_scores[name]} | figures), flush=True)
    for method, scores in merged_scores.items():
        rank = stats.spearmanr(list(trained_scores.values()), list(scores.values())).statistic
        half = 1.96 / np.sqrt(max(1, len(trained_scores) - 3))  # Fisher's transformation
        low, high = np.tanh(np.arctanh(np.clip(rank, -0.999, 0.999)) + np.array([-half, half]))
        agreement = measure_agreement(scores, trained_scores)
        print(
            f"{method}: Spearman {rank:.2f} ({low:.2f} to {high:.2f}), {agreement.right} of {agreement.pairs} pairs, "
            f"{100 * agreement.share:.0f} % ({100 * agreement.low:.0f} to {100 * agreement.high:.0f})"
        )


if __name__ == "__main__":
    main()
