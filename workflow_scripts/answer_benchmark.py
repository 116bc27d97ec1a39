"""What the fine-tuned model answers to a benchmark's questions, greedily decoded.

    python workflow_scripts/answer_benchmark.py --config results/baseline/benchmarks/textvqa/config.yaml \\
        --model results/models/tiny/mgm --finetuned results/baseline/finetune \\
        --output-dir results/baseline/benchmarks/textvqa

The configuration holds `benchmark` (its name), `files` (see formats/textvqa.py and formats/mmbench.py), `template`,
`decoding`, `gpus` and `cpu_threads`. Writes answers.jsonl: each question with its prompt, truth and `prediction`.
"""

import sys
import time
from io import BytesIO

from command_line import command_line, path_arguments
from compute import use_cpu_threads
from files import read_yaml, write_jsonl
from formats.mmbench import read_mmbench
from formats.textvqa import read_textvqa
from mgm.generators import generators

READERS = {"textvqa": read_textvqa, "mmbench": read_mmbench}


@command_line
def main() -> None:
    args = path_arguments(__doc__, "--config", "--model", "--finetuned", "--output-dir")
    settings = read_yaml(args.config)
    use_cpu_threads(settings["cpu_threads"])
    rows = list(READERS[settings["benchmark"]](**settings["files"]))
    images = [row.pop("image") for row in rows]
    files = [BytesIO(image) if isinstance(image, bytes) else image for image in images]

    start = time.monotonic()
    prompts = [row["prompt"] for row in rows]
    with generators(args.model, args.finetuned, settings["gpus"]) as generator:
        predictions = generator.answer(files, prompts, settings["template"], **settings["decoding"])
        answered = [row | {"prediction": text} for row, text in zip(rows, predictions, strict=True)]
    write_jsonl(args.output_dir / "answers.jsonl", answered)
    print(f"{len(answered)} answers in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
