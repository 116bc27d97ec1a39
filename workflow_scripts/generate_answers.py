r"""Generate captions and answers about the held-out images after each stage, and about other images as a control.

    python workflow_scripts/generate_answers.py --config results/baseline/generate/config.yaml \
        --model results/models/tiny/mgm --evaluation results/datasets/shapes/evaluation.jsonl \
        --pretrained results/baseline/pretrain --finetuned results/baseline/finetune \
        --output-dir results/baseline/generate

Without --pretrained, the base model takes the place of stage 1. Writes captions.jsonl (of both), answers.jsonl (not of
stage 1), and likelihoods.jsonl, the log-likelihoods of reference answers and captions (of both, and of the base model).
Each row states whether its own image was used or another one (`shuffled`), and rows with the same image have the same
`image_id`. The likelihoods of answers are also computed without an image (`none`).
"""

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.config.settings.evaluation import GenerateSettings
    from dj2mgm.config.settings.validation import load_settings
    from dj2mgm.data.formats import read_evaluation
    from dj2mgm.errors import InputError
    from dj2mgm.evaluation.groups import NO_IMAGE, control_paths, image_ids, image_paths
    from dj2mgm.evaluation.reference_likelihoods import ANSWER, CAPTION, likelihood_row
    from dj2mgm.files import write_jsonl
    from dj2mgm.generators import open_generators
    from dj2mgm.messages import Progress


@command_line
def main() -> None:
    required = ("--config", "--model", "--evaluation", "--finetuned", "--output-dir")
    args = parse_paths(__doc__, *required, optional=("--pretrained",))
    settings = load_settings(GenerateSettings, args.config)
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)

    rows = list(read_evaluation(args.evaluation))
    paths = image_paths(settings.image_root, rows)
    if len(set(paths)) < 2:
        raise InputError(
            f"{args.evaluation} has {len(set(paths))} different images; at least 2 are needed for the shuffled control"
        )
    sets = {"own": paths, "shuffled": control_paths(paths, settings.seed)}
    ids = [{"id": row["id"], "image_id": image} for row, image in zip(rows, image_ids(rows, paths), strict=True)]
    questions = [(index, question) for index, row in enumerate(rows) for question in row["questions"]]
    prompts = [settings.question_prompt.replace("{question}", question["question"]) for _, question in questions]

    decoding = dict(settings.decoding)
    # own and other images in one call, so that each image is encoded once and its caption is used for both
    all_rows = [(images, index) for images in sets for index in range(len(rows))]
    all_questions = [(images, index, question) for images in sets for index, question in questions]

    references = [
        (images, index, ANSWER, prompt, question["answer"])
        for images in sets
        for (index, question), prompt in zip(questions, prompts, strict=True)
    ]
    blind = [(NO_IMAGE, *reference[1:]) for reference in references if reference[0] == "own"]
    described = [(*row, CAPTION, caption) for row in all_rows for caption in rows[row[1]]["captions"]]

    captions, answers, likelihoods = [], [], []
    with open_generators(args.model, settings.gpus) as load:
        for stage in dict.fromkeys((None, args.pretrained, args.finetuned)):
            name = stage.name if stage else "base"
            caption = settings.captions.get(name, settings.captions.get("pretrain"))
            generator = load(stage)
            for template, asked in (
                (settings.template, references),
                (settings.template, blind),
                (caption.template, [(*row[:3], caption.question, row[3]) for row in described]),
            ):
                files = [sets[images][index] if images in sets else None for images, index, *_ in asked]
                found = generator.likelihoods(files, [row[3] for row in asked], [row[4] for row in asked], template)
                found = Progress(f"likelihoods, {name}", len(files)).follow(found)
                likelihoods += [
                    ids[index] | {"model": name, "images": images} | likelihood_row(kind, question, text, values)
                    for (images, index, kind, question, text), values in zip(asked, found, strict=True)
                    if values
                ]
            if name not in settings.captions:  # the base model before stage 1
                continue
            files = [sets[images][index] for images, index in all_rows]
            texts = generator.answer(files, [caption.question] * len(files), caption.template, **decoding)
            texts = Progress(f"captions, {name}", len(files)).follow(texts)
            captions += [
                ids[index] | {"image": rows[index]["image"], "model": name, "images": images, "caption": text}
                for (images, index), text in zip(all_rows, texts, strict=True)
            ]
            if stage == args.pretrained and stage:  # stage 1 does not train answers
                continue
            files = [sets[images][index] for images, index, _ in all_questions]
            texts = generator.answer(files, prompts * len(sets), settings.template, **decoding)
            texts = Progress(f"answers, {name}", len(files)).follow(texts)
            answers += [
                ids[index] | {"model": name, "images": images, **question, "prediction": text}
                for (images, index, question), text in zip(all_questions, texts, strict=True)
            ]
    write_jsonl(args.output_dir / "likelihoods.jsonl", likelihoods)
    write_jsonl(args.output_dir / "answers.jsonl", answers)
    write_jsonl(args.output_dir / "captions.jsonl", captions)


if __name__ == "__main__":
    main()
