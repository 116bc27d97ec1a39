r"""Convert pairs and instructions to the trainer's files, with absolute and verified image paths.

    python workflow_scripts/write_jsonl.py --config results/shapes/tiny/baseline/jsonl/config.yaml \
        --pairs results/shapes/tiny/baseline/filter/filtered.jsonl \
        --instructions results/datasets/shapes/finetune.json \
        --evaluation results/datasets/shapes/evaluation.jsonl --output-dir results/shapes/tiny/baseline/jsonl

Without instructions (an empty list), stage 2 trains on the pairs, with a question that asks for the caption. A row
whose image is in the evaluation file is handled as a bad row. A model without stage 1 (`one_stage`) is fine-tuned on
both files; without instructions, finetune.jsonl is then empty.

`--same-samples-as results/shapes/tiny/baseline/jsonl/summary.json` drops or repeats rows until each file has as many
samples as in another experiment, so that only the data differs and not the amount of training.

`--same-rows-as results/shapes/tiny/dj_synth/jsonl/summary.json` draws as many different rows at random as another
experiment uses.

`--leaks results/datasets/photos/leaks/leaks.jsonl` drops rows about images of the evaluation, and instructions that ask
a benchmark's question.

`--synthesized results/shapes/tiny/dj_synth_instructions/synthesize/synthesized.jsonl` has the instructions that the
synthesize stage has kept. They replace all instructions of one question about one image.

Writes pretrain.jsonl, finetune.jsonl and summary.json (counts that add up).
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.cli.messages import note
from dj2mgm.data.images import HeldOutImages
from dj2mgm.data.instruction_rows import is_single_question
from dj2mgm.data.training_jsonl import SampleRules, convert_pairs, write_training_jsonl
from dj2mgm.errors import InputError, pluralize
from dj2mgm.records import JsonlSummary, SourceSamples, TrainingFileCounts, read_jsonl_summary
from dj2mgm.settings.data import CAPTION_QUESTION, JsonlSettings
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import compute_sha256, read_jsonl, write_json
from dj2mgm.storage.streaming import DiskMap, read_json_list

FEW_ROWS = 10  # a smaller integer as the amount of a source may be meant as a weight


@command_line
def main() -> None:
    required = ("--config", "--pairs", "--instructions", "--evaluation", "--output-dir")
    args = parse_paths(__doc__, *required, optional=("--same-samples-as", "--same-rows-as", "--leaks", "--synthesized"))
    settings = load_settings(JsonlSettings, args.config)
    processes = settings.cpu_threads or len(os.sched_getaffinity(0))
    budgets = read_jsonl_summary(args.same_samples_as).files if args.same_samples_as else None
    sizes = read_jsonl_summary(args.same_rows_as) if args.same_rows_as else None
    leaked_images, leaked_rows = _read_leaks(args.leaks)
    selected_split = "finetune" if sizes and "synthesized" in sizes.inputs else "pretrain"
    held_out = HeldOutImages(read_jsonl(args.evaluation), settings.evaluation_images)
    files: dict[str, TrainingFileCounts] = {}
    checks: defaultdict[str, DiskMap] = defaultdict(DiskMap)  # by image folder; both files may have the same images
    for name, (rows, root) in _read_splits(settings, args.pairs, args.instructions, args.synthesized).items():
        output = args.output_dir / f"{name}.jsonl"
        budget = budgets[name].rows_out if budgets else None
        size = sizes.files[name].different_rows if sizes else None
        rules = SampleRules(
            settings,
            budget,
            leaked_images,
            leaked_rows if name == "finetune" else frozenset(),
            size,
            selected_split,
            size_before=sizes.files[name].rows_in if sizes else 0,
        )
        counts = files[name] = write_training_jsonl(rows, root, held_out, output, rules, processes, checks[root])
        repeats = f" ({counts.repeated:,} of them repeated)" if counts.repeated else ""
        note_amounts(name, counts.sources, settings.sources, settings.shares)
        if (lost := sum(counts.losses.values())) > counts.rows_in / 3:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.losses.items())
            note(f"{lost:,} of {counts.rows_in:,} rows of {name} are dropped ({reasons})")
        print(
            f"{name}: {pluralize(counts.rows_out, 'sample')}{repeats} from {pluralize(counts.rows_in, 'row')}, "
            f"in {output}",
            flush=True,
        )
    for source, amount in settings.sources.items():
        usable = any(source in counts.sources for counts in files.values())
        if isinstance(amount, int) and amount and not usable:
            raise InputError(f"sources.{source}: {amount} rows are requested, but none can be trained on; set it to 0")
    inputs = {"pairs": args.pairs, "instructions": args.instructions, "evaluation": args.evaluation}
    inputs |= {"synthesized": args.synthesized} if args.synthesized else {}
    summary = JsonlSummary(files, {name: compute_sha256(file) for name, file in inputs.items()})
    write_json(args.output_dir / "summary.json", summary.as_dict())


def _read_leaks(file: Path | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of leaked images, and the ids of leaked instructions."""
    keys = "path", "row"
    return tuple(frozenset(leak[key] for leak in (read_jsonl(file) if file else ()) if key in leak) for key in keys)


def _read_splits(
    settings: JsonlSettings, pairs: Path, instructions: Path, synthesized: Path | None
) -> dict[str, tuple[Iterator[dict], str]]:
    """Return the rows of each stage, and the folder that their image paths are relative to."""
    sources = {"pretrain": (convert_pairs(read_jsonl(pairs), settings.question), settings.pretrain_images)}
    if synthesized:
        other_rows = (row for row in read_json_list(instructions) if not is_single_question(row))
        sources["finetune"] = chain(convert_pairs(read_jsonl(synthesized), ""), other_rows), settings.finetune_images
    elif next(read_json_list(instructions), None) is None:
        caption_rows = () if settings.one_stage else convert_pairs(read_jsonl(pairs), CAPTION_QUESTION)
        sources["finetune"] = caption_rows, settings.pretrain_images
    else:
        sources["finetune"] = read_json_list(instructions), settings.finetune_images
    return sources


def note_amounts(
    stage: str, counts: dict[str, SourceSamples], amounts: dict[str, float], shares: dict[str, float]
) -> None:
    """Print notes about amounts that may be mistakes: a source without samples, an integer that looks like a weight."""
    for source, count in counts.items():
        key, unit = ("shares", "share") if source in shares else ("sources", "amount")
        amount, usable = shares.get(source, amounts.get(source, 1.0)), f"{count.usable} rows of {stage}"
        if amount and not count.rows_out:
            note(f"{key}.{source}: none of its {usable} is used; raise its {unit} ({amount}), or lower the others")
        elif isinstance(amount, int) and 0 < amount < min(FEW_ROWS, count.usable):
            verb = "is" if amount == 1 else "are"
            note(f"sources.{source}: {amount} of its {usable} {verb} used; for a weight per row, write {amount}.0")


if __name__ == "__main__":
    main()
