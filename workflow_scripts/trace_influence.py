r"""Find the training rows behind wrong answers to held-out questions.

    python workflow_scripts/trace_influence.py --config results/shapes/tiny/baseline/influence/config.yaml \
        --model results/models/tiny/mgm --finetuned results/shapes/tiny/baseline/finetune \
        --data results/shapes/tiny/baseline/jsonl/finetune.jsonl \
        --answers results/shapes/tiny/baseline/generate/answers.jsonl \
        --generate-config results/shapes/tiny/baseline/generate/config.yaml \
        --evaluation results/datasets/shapes/evaluation.jsonl \
        --output-dir results/shapes/tiny/baseline/influence

Writes influence.jsonl, the instructions of lowest and of highest influence on each right answer, and influence.html.
With --statistics results/shapes/tiny/dj_synth_instructions/synthesize/stats.jsonl, the page shows the correlation of
the rows' statistics with their influence.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from pathlib import Path

    import torch

    from dj2mgm.cli.messages import Progress
    from dj2mgm.compute import select_device, use_cpu_threads
    from dj2mgm.data.formats import build_conversation, read_llava
    from dj2mgm.data.training_jsonl import drop_repeats
    from dj2mgm.errors import InputError
    from dj2mgm.evaluation.influence import ExtremeRows, LabelledTokens, measure_influence, read_labelled_tokens
    from dj2mgm.evaluation.served_answers import AskedQuestion, read_served_questions
    from dj2mgm.evaluation.vqa import is_correct
    from dj2mgm.models.families import load_family
    from dj2mgm.models.trained_weights import load_stage_weights
    from dj2mgm.reporting.influence_page import TracedAnswer, TracedRow, rate_statistics, write_influence_page
    from dj2mgm.reporting.rendering import select_evenly
    from dj2mgm.settings.evaluation import GenerateSettings, InfluenceSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_jsonl


@command_line
def main() -> None:
    required = (
        "--config",
        "--model",
        "--finetuned",
        "--data",
        "--answers",
        "--generate-config",
        "--evaluation",
        "--output-dir",
    )
    args = parse_paths(__doc__, *required, optional=("--statistics",))
    settings = load_settings(InfluenceSettings, args.config)
    use_cpu_threads(settings.cpu_threads)
    questions = read_served_questions(
        args.evaluation, args.answers.parent, load_settings(GenerateSettings, args.generate_config)
    )
    wrong_questions = [question for question in questions if question.is_question and not is_correct(question.row)]
    if not wrong_questions:
        raise InputError(f"{args.answers} has no wrong answer to a held-out question, so there is nothing to trace")
    rows = list(drop_repeats(read_llava(args.data)))
    traced_questions = select_evenly(wrong_questions, settings.questions)
    traced_answers, influence = trace(args.model, args.finetuned, settings, traced_questions, rows)
    write_jsonl(args.output_dir / "influence.jsonl", (answer.as_dict() for answer in traced_answers))
    counts = {"asked": len(questions), "wrong": len(wrong_questions), "rows": len(rows)}
    statistics = list(rate_statistics(args.statistics, influence)) if args.statistics else []
    write_influence_page(
        args.output_dir / "influence.html", args.output_dir.parent.name, counts, traced_answers, statistics
    )


def trace(
    base: Path, stage: Path, settings: InfluenceSettings, questions: list[AskedQuestion], rows: list[dict]
) -> tuple[list[TracedAnswer], dict[str, float]]:
    """Return each wrong answer with its rows of lowest and of highest influence, and the mean influence by row id."""
    device = select_device()
    family = load_family(base)
    model = family.load(torch.bfloat16 if device.type == "cuda" else torch.float32, "sdpa")
    model = load_stage_weights(model, stage).to(device).eval()
    encoder, head = family.make_encoder(settings.template, settings.max_length), family.find_parts(model).head
    right_answers = [
        build_conversation("", str(question.image), question.prompt, question.row["answer"]) for question in questions
    ]
    answers = LabelledTokens.concatenate(list(read_labelled_tokens(model, family, encoder, right_answers, device)))
    extremes, progress = ExtremeRows(settings.rows), Progress("training rows", len(rows))
    means: list[float] = []
    for tokens in read_labelled_tokens(model, family, encoder, rows, device):
        influence = measure_influence(tokens, answers, head)
        extremes.add(influence)
        means += influence.mean(dim=1).tolist()
        progress.add(tokens.count)
    traced_answers = [
        TracedAnswer(
            question=question,
            harmful=[TracedRow(rows[row], value) for value, row in extremes.find_lowest(number) if value < 0],
            helpful=[TracedRow(rows[row], value) for value, row in extremes.find_highest(number) if value > 0],
        )
        for number, question in enumerate(questions)
    ]
    return traced_answers, {row["id"]: mean for row, mean in zip(rows, means, strict=True)}


if __name__ == "__main__":
    main()
