r"""Answer a benchmark's questions with the fine-tuned model or the one before training, by greedy decoding.

    python workflow_scripts/answer_benchmark.py --config results/shapes/tiny/baseline/benchmarks/textvqa/config.yaml \
        --model results/models/tiny/mgm --finetuned results/shapes/tiny/baseline/finetune \
        --output-dir results/shapes/tiny/baseline/benchmarks/textvqa

Without `--finetuned`, the model before training answers. Writes answers.jsonl with each question's prompt, ground
truth, `prediction` and `blind_prediction`, the answer without the image.
"""

from io import BytesIO

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.cli.messages import Progress
    from dj2mgm.compute import use_cpu_threads
    from dj2mgm.features.challenge.benchmarks import read_questions
    from dj2mgm.features.challenge.challenge_keys import BenchmarkSettings
    from dj2mgm.models.generators import open_generators
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_jsonl


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--model", "--output-dir", optional=("--finetuned",))
    settings = load_settings(BenchmarkSettings, args.config)
    use_cpu_threads(settings.cpu_threads)
    rows = list(read_questions(settings.benchmark, settings.files))
    images = [row.pop("image") for row in rows]
    files = [BytesIO(image) if isinstance(image, bytes) else image for image in images]

    prompts = [row["prompt"] for row in rows]
    with open_generators(args.model, settings.gpus) as load:
        generator = load(args.finetuned)
        answer_rows = rows
        for key, inputs in {"prediction": files, "blind_prediction": [None] * len(files)}.items():
            texts = generator.answer(inputs, prompts, settings.template, **dict(settings.decoding))
            texts = Progress(f"answers, {key}".replace("_", " "), len(rows)).follow(texts)
            answer_rows = [row | {key: text} for row, text in zip(answer_rows, texts, strict=True)]
    write_jsonl(args.output_dir / "answers.jsonl", answer_rows)


if __name__ == "__main__":
    main()
