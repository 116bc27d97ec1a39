r"""Answer a task's questions with the fine-tuned model, or with the model before training.

    python workflow_scripts/answer_evaluation.py --config results/shapes/tiny/baseline/evaluations/pope/config.yaml \
        --questions results/evaluations/pope --model results/models/tiny/mgm \
        --finetuned results/shapes/tiny/baseline/finetune --output-dir results/shapes/tiny/baseline/evaluations/pope

The fine-tuned model answers with each question's own image, with another image, and without one. Without `--finetuned`,
the model before training answers with own images. `--questions` is the output folder of read_evaluation.py. The task
sets the maximum length of an answer, or else `decoding` does. Decoding is greedy, and answers are cut where lmms-eval's
own class of the model cuts them (features/lmms_eval/exchange.py). Writes answers.jsonl with the rows of
questions.jsonl, each with `model` (finetune, base), `images` (own, shuffled, none) and `prediction`.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.cli.messages import Progress
    from dj2mgm.compute import use_cpu_threads
    from dj2mgm.errors import InputError
    from dj2mgm.evaluation.groups import draw_control_paths, locate_row_images
    from dj2mgm.features.lmms_eval.exchange import cut_answer, find_stop_texts
    from dj2mgm.features.lmms_eval.lmms_eval_keys import AnswerSettings
    from dj2mgm.models.generators import open_generators
    from dj2mgm.score_groups import FINETUNED, NO_IMAGE, OWN, SHUFFLED, UNTRAINED
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl


@command_line
def main() -> None:
    required = ("--config", "--questions", "--model", "--output-dir")
    args = parse_paths(__doc__, *required, optional=("--finetuned",))
    settings = load_settings(AnswerSettings, args.config)
    use_cpu_threads(settings.cpu_threads)
    rows = list(read_jsonl(args.questions / "questions.jsonl", may_be_empty=False))
    task = read_json(args.questions / "decoding.json")
    decoding = dict(settings.decoding) | ({"max_new_tokens": task["max_new_tokens"]} if task["max_new_tokens"] else {})
    stop_texts = find_stop_texts(args.model, task["until"])
    paths = locate_row_images(args.questions, rows)
    if len(set(paths)) < 2:
        raise InputError(
            f"{args.questions} has {len(set(paths))} different images; at least 2 are needed for the shuffled control"
        )
    image_sets = {OWN: paths}
    if args.finetuned:
        image_sets |= {SHUFFLED: draw_control_paths(paths, settings.seed), NO_IMAGE: [None] * len(rows)}
    model = FINETUNED if args.finetuned else UNTRAINED
    prompts = [row["prompt"] for row in rows]
    answer_rows = []
    with open_generators(args.model, settings.gpus) as load:
        generator = load(args.finetuned)
        for images, files in image_sets.items():
            texts = generator.answer(files, prompts, settings.template, **decoding)
            texts = Progress(f"answers, images: {images}", len(rows)).follow(texts)
            answer_rows += [
                row | {"model": model, "images": images, "prediction": cut_answer(text, stop_texts)}
                for row, text in zip(rows, texts, strict=True)
            ]
    write_jsonl(args.output_dir / "answers.jsonl", answer_rows)


if __name__ == "__main__":
    main()
