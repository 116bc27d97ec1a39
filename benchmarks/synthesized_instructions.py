"""Compare a synthesize stage of instructions with the truth of the embedded dataset.

    snakemake dj_synth_instructions --config dataset=shapes_wrong_instructions
    python benchmarks/synthesized_instructions.py results/shapes/tiny/dj_synth_instructions/synthesize \
        results/datasets/shapes_wrong_instructions

Prints for each statistic how well it separates planted wrong answers from right answers (area under the ROC curve).
Then it prints the kept shares of both, and the share of accepted new instructions that are true, by kind of question.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts")]

import numpy as np  # noqa: E402
from scipy.stats import mannwhitneyu  # noqa: E402

from dj2mgm.data.formats import extract_caption  # noqa: E402
from dj2mgm.data.shapes import (  # noqa: E402
    COUNT_WORDS,
    Scene,
    draw_row_scene,
)
from dj2mgm.storage.files import read_jsonl, read_yaml  # noqa: E402


def find_answer(scene: Scene, question: str) -> str | None:
    """Return the only correct answer to a question about a scene, or None if the scene has no such object."""
    for item in scene.objects:
        if question == f"What color is the {item.shape}?":
            return item.color
        if question == f"What shape is the {item.color} object?":
            return item.shape
        if question == f"Where is the {item.name}?":
            return item.position
    if question == "How many objects are there?":
        return COUNT_WORDS[len(scene.objects)]
    if question.startswith("Is there a"):
        subject = question.rstrip("?").split()[-2:]
        return "yes" if subject in [[item.color, item.shape] for item in scene.objects] else "no"
    return None


def compute_roc_area(wrong: np.ndarray, right: np.ndarray) -> float:
    """Return the probability that a right answer has a higher value than a wrong answer."""
    return float(mannwhitneyu(right, wrong).statistic / (len(right) * len(wrong)))


def print_row(name: str, **values: object) -> None:
    print(json.dumps({"measured": name} | values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", type=Path, help="folder of the synthesize stage")
    parser.add_argument("dataset", type=Path, help="folder of the dataset")
    arguments = parser.parse_args()
    seed = read_yaml(arguments.dataset / "config.yaml")["seed"]
    truth = {row["id"]: row["fault"] == "wrong" for row in read_jsonl(arguments.dataset / "true_answers.jsonl")}
    accepted = {row["id"]: row for row in read_jsonl(arguments.stage / "synthesized.jsonl")}
    stats = {row["id"]: row for row in read_jsonl(arguments.stage / "stats.jsonl")}
    dropped = (row for row in read_jsonl(arguments.stage / "dropped.jsonl") if row["event"] == "dropped")
    stats |= {row["id"]: row["stats"] for row in dropped}
    answer_ids = [name for name in stats if name in truth]
    for statistic in ("likelihood_gain", "blind_likelihood", "round_trip_agreement"):
        values = {name: stats[name][statistic][0] for name in answer_ids if stats[name].get(statistic)}
        wrong = np.array([value for name, value in values.items() if truth[name]])
        right = np.array([value for name, value in values.items() if not truth[name]])
        if len(wrong) and len(right):
            print_row(statistic, rows=len(values), area=round(compute_roc_area(wrong, right), 3))
    for name, fault in (("right", False), ("wrong", True)):
        rows = [row for row in answer_ids if truth[row] == fault]
        print_row(
            f"given {name} answers", rows=len(rows), kept=round(float(np.mean([row in accepted for row in rows])), 3)
        )
    kinds: defaultdict[str, list[bool]] = defaultdict(list)
    for name, row in accepted.items():
        if "+" in name:
            scene = draw_row_scene(seed, "pretrain", int(name.partition("+")[0].removeprefix("p")))
            answer = find_answer(scene, row["question"])
            kinds[" ".join(row["question"].split()[:2])].append(answer == extract_caption(row["text"]))
    for kind, truths in kinds.items():
        print_row(f"new instructions: {kind}", rows=len(truths), true=round(float(np.mean(truths)), 3))
    all_truths = [value for truths in kinds.values() for value in truths]
    if all_truths:
        print_row("new instructions", rows=len(all_truths), true=round(float(np.mean(all_truths)), 3))


if __name__ == "__main__":
    main()
