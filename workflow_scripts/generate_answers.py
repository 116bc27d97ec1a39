r"""Generate captions and answers about the held-out images after each stage, and about other images as a control.

    python workflow_scripts/generate_answers.py --config results/shapes/tiny/baseline/generate/config.yaml \
        --model results/models/tiny/mgm --evaluation results/datasets/shapes/evaluation.jsonl \
        --pretrained results/shapes/tiny/baseline/pretrain --finetuned results/shapes/tiny/baseline/finetune \
        --output-dir results/shapes/tiny/baseline/generate

Without --pretrained, the base model takes the place of stage 1. Writes captions.jsonl (of both), answers.jsonl (not of
stage 1), and likelihoods.jsonl, the log-likelihoods of reference answers and captions (of both, and of the base model).
Each row states whether its own image was used or another image (`shuffled`). Rows with the same image have the same
`image_id`. The likelihoods of answers are also computed without an image (`none`).
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.evaluation.held_out_rows import HeldOutRows
    from dj2mgm.models.generators import open_generators
    from dj2mgm.score_groups import PRETRAINED, UNTRAINED
    from dj2mgm.settings.evaluation import GenerateSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_jsonl


@command_line
def main() -> None:
    required = ("--config", "--model", "--evaluation", "--finetuned", "--output-dir")
    args = parse_paths(__doc__, *required, optional=("--pretrained",))
    settings = load_settings(GenerateSettings, args.config)
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)

    held_out = HeldOutRows(args.evaluation, settings)
    captions, answers, likelihoods = [], [], []
    with open_generators(args.model, settings.gpus) as load:
        for stage in dict.fromkeys((None, args.pretrained, args.finetuned)):
            name = stage.name if stage else UNTRAINED
            prompt = settings.captions.get(name, settings.captions.get(PRETRAINED))
            generator = load(stage)
            likelihoods += held_out.measure_likelihoods(generator, name, prompt)
            if name not in settings.captions:  # the base model before stage 1
                continue
            captions += held_out.caption_images(generator, name, prompt)
            if stage is None or stage != args.pretrained:  # stage 1 does not train answers
                answers += held_out.answer_questions(generator, name)
    write_jsonl(args.output_dir / "likelihoods.jsonl", likelihoods)
    write_jsonl(args.output_dir / "answers.jsonl", answers)
    write_jsonl(args.output_dir / "captions.jsonl", captions)


if __name__ == "__main__":
    main()
