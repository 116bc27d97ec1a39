"""Everything the page shows of one experiment, read from the files that its rules left."""

from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from evaluation.groups import Estimates
from files import read_json, read_jsonl, read_yaml
from formats.evaluation_jsonl import read_evaluation

STAGES = ("pretrain", "finetune")
# file below the experiment's folder: the rule that makes it
RULE_OF_FILE = {
    "filter/summary.json": "filter_data",
    "jsonl/summary.json": "write_jsonl",
    "pretrain/metrics.json": "pretrain",
    "pretrain/metrics.jsonl": "pretrain",
    "finetune/metrics.json": "finetune",
    "finetune/metrics.jsonl": "finetune",
    "generate/captions.jsonl": "generate_answers",
    "generate/answers.jsonl": "generate_answers",
    "evaluate_clip/config.yaml": "evaluate_clip",
    "evaluate_clip/metrics.json": "evaluate_clip",
    "evaluate_vqa/metrics.json": "evaluate_vqa",
}


@dataclass(frozen=True)
class Experiment:
    name: str
    dataset: str
    dataset_counts: dict[str, int]  # pretrain, finetune, evaluation
    filter: dict  # filter/summary.json
    jsonl: dict  # jsonl/summary.json
    records: dict[str, dict]  # by stage: metrics.json
    steps: dict[str, list[dict]]  # by stage: rows of metrics.jsonl
    clip: dict  # evaluate_clip/metrics.json
    vqa: dict  # evaluate_vqa/metrics.json
    captions: list[dict]
    answers: list[dict]
    evaluation: list[dict]
    image_root: Path

    @property
    def groups(self) -> dict[str, Estimates]:
        """Estimates of all metrics by group (`finetune/own`, …, `reference`), captions' and answers' together."""
        names = [*self.clip["groups"], *(group for group in self.vqa["groups"] if group not in self.clip["groups"])]
        return {name: self.clip["groups"].get(name, {}) | self.vqa["groups"].get(name, {}) for name in names}


def load_experiment(folder: str | Path, dataset_folder: str | Path) -> Experiment:
    """Read an experiment's results (`results/<experiment>`) and its dataset's (`results/datasets/<dataset>`).

    Raises:
        InputError: a file is missing; names it and the rule that makes it.
    """
    folder, dataset_folder = Path(folder), Path(dataset_folder)
    wanted = {folder / name: rule for name, rule in RULE_OF_FILE.items()}
    wanted |= {dataset_folder / name: "make_dataset" for name in ("summary.json", "evaluation.jsonl")}
    for path, rule in wanted.items():
        if not path.is_file():
            raise InputError(f"{path} does not exist, so {folder.name} cannot be reported; run the rule {rule} first")
    return Experiment(
        name=folder.name,
        dataset=dataset_folder.name,
        dataset_counts=read_json(dataset_folder / "summary.json"),
        filter=read_json(folder / "filter/summary.json"),
        jsonl=read_json(folder / "jsonl/summary.json"),
        records={stage: read_json(folder / stage / "metrics.json") for stage in STAGES},
        steps={stage: list(read_jsonl(folder / stage / "metrics.jsonl")) for stage in STAGES},
        clip=read_json(folder / "evaluate_clip/metrics.json"),
        vqa=read_json(folder / "evaluate_vqa/metrics.json"),
        captions=list(read_jsonl(folder / "generate/captions.jsonl")),
        answers=list(read_jsonl(folder / "generate/answers.jsonl")),
        evaluation=list(read_evaluation(dataset_folder / "evaluation.jsonl")),
        image_root=Path(read_yaml(folder / "evaluate_clip/config.yaml")["image_root"]),
    )
