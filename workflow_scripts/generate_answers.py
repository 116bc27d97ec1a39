"""What the model says about the held-out images after each stage, and about other images as a control.

    python workflow_scripts/generate_answers.py --config results/baseline/generate/config.yaml \\
        --model results/models/tiny/mgm --evaluation results/datasets/shapes/evaluation.jsonl \\
        --pretrained results/baseline/pretrain --finetuned results/baseline/finetune \\
        --output-dir results/baseline/generate

Writes captions.jsonl (both stages) and answers.jsonl (the last stage); rows say whether the model was shown the row's
own image or another one (`shuffled`).
"""

import sys
import time

from command_line import command_line, path_arguments
from compute import set_seed, use_cpu_threads
from errors import InputError
from evaluation.generation import image_paths, other_images
from files import read_yaml, write_jsonl
from formats.evaluation_jsonl import read_evaluation
from mgm.generators import generators


@command_line
def main() -> None:
    args = path_arguments(__doc__, "--config", "--model", "--evaluation", "--pretrained", "--finetuned", "--output-dir")
    settings = read_yaml(args.config)
    use_cpu_threads(settings["cpu_threads"])
    set_seed(settings["seed"])

    rows = list(read_evaluation(args.evaluation))
    if len(rows) < 2:
        raise InputError(f"{args.evaluation} has {len(rows)} images; at least 2 are needed for the shuffled control")
    paths = image_paths(settings["image_root"], rows)
    others = other_images(len(rows), settings["seed"])
    shown = {"own": paths, "shuffled": [paths[other] for other in others]}
    questions = [(index, question) for index, row in enumerate(rows) for question in row["questions"]]
    asked = [settings["question_prompt"].replace("{question}", question["question"]) for _, question in questions]
    decoding = settings["decoding"]

    captions, answers = [], []
    for stage in (args.pretrained, args.finetuned):
        name = stage.name
        caption = settings["captions"][name]
        with generators(args.model, stage, settings["gpus"]) as generator:
            for images, files in shown.items():
                start = time.monotonic()
                texts = generator.answer(files, [caption["question"]] * len(rows), caption["template"], **decoding)
                captions += [
                    {"id": row["id"], "image": row["image"], "model": name, "images": images, "caption": text}
                    for row, text in zip(rows, texts, strict=True)
                ]
                _say(f"{name}, {images} images: {len(rows)} captions", start)
                if stage != args.finetuned:
                    continue
                start = time.monotonic()
                texts = generator.answer([files[i] for i, _ in questions], asked, settings["template"], **decoding)
                answers += [
                    {"id": rows[index]["id"], "model": name, "images": images, **question, "prediction": text}
                    for (index, question), text in zip(questions, texts, strict=True)
                ]
                _say(f"{name}, {images} images: {len(questions)} answers", start)
    write_jsonl(args.output_dir / "answers.jsonl", answers)
    write_jsonl(args.output_dir / "captions.jsonl", captions)


def _say(what: str, start: float) -> None:
    print(f"{what} in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
