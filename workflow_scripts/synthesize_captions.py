r"""Rewrite captions that do not fit their image with a Data-Juicer recipe, and keep the rows that fit afterwards.

    python workflow_scripts/synthesize_captions.py --config results/shapes/tiny/dj_synth/synthesize/config.yaml \
        --data results/shapes/tiny/baseline/filter/filtered.jsonl \
        --captioner-model results/models/tiny/mgm --captioner-stage results/shapes/tiny/baseline/pretrain \
        --output-dir results/shapes/tiny/dj_synth/synthesize

`--instructions results/datasets/shapes/finetune.json --evaluation results/datasets/shapes/evaluation.jsonl` are for a
recipe with `rows: instructions`, which selects instructions, and may write new ones about the images of the pairs.

Only the captioner mgm, a model that this workflow has trained, needs the two captioner flags.

Writes synthesized.jsonl, stats.jsonl, dropped.jsonl and summary.json. New captions are also kept in the folder
`captions` of the settings, so that a killed or changed run does not request them again.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.storage.files import read_jsonl
from dj2mgm.storage.streaming import read_json_list
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from transformers.utils import logging as transformers_log

    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.data.images import HeldOutImages
    from dj2mgm.data.instruction_rows import convert_instructions, make_slots
    from dj2mgm.errors import InputError
    from dj2mgm.juicer.patched_data_juicer import prepare_process
    from dj2mgm.juicer.recipe_settings import (
        CaptionerModel,
        InstructionFiles,
        RecipeSettings,
        count_slots,
        prepare_synthesis,
    )
    from dj2mgm.juicer.run_recipe import SYNTHESIZED, configure_log, run_recipe
    from dj2mgm.records import INSTRUCTIONS_FILE
    from dj2mgm.settings.data import SynthesizeSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_jsonl


def read_instruction_rows(
    recipe: RecipeSettings, settings: SynthesizeSettings, pairs: Path, files: InstructionFiles
) -> Iterator[dict]:
    """Yield the dataset's instructions as rows, and then the empty rows that the recipe fills."""
    yield from convert_instructions(read_json_list(files.instructions))
    if settings.evaluation_images is not None:
        held_out = HeldOutImages(read_jsonl(files.evaluation), settings.evaluation_images)
        conversations = read_json_list(files.instructions)
        yield from make_slots(read_jsonl(pairs), conversations, held_out, recipe.image_root, count_slots(recipe))


@command_line
def main() -> None:
    captioner_flags, dataset_flags = ("--captioner-model", "--captioner-stage"), ("--instructions", "--evaluation")
    arguments = parse_paths(__doc__, "--config", "--data", "--output-dir", optional=(*captioner_flags, *dataset_flags))
    if (arguments.captioner_model is None) != (arguments.captioner_stage is None):
        raise InputError("--captioner-model and --captioner-stage belong together. Give both or neither")
    model = arguments.captioner_model and CaptionerModel(arguments.captioner_model, arguments.captioner_stage)
    settings = load_settings(SynthesizeSettings, arguments.config)
    files = arguments.instructions and InstructionFiles(arguments.instructions, arguments.evaluation)
    recipe = prepare_synthesis(arguments.config, settings, arguments.output_dir, model, files)
    configure_log()
    if not sys.stderr.isatty():
        transformers_log.disable_progress_bar()
    prepare_process()
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)
    data = arguments.data
    if files:
        data = arguments.output_dir / INSTRUCTIONS_FILE
        write_jsonl(data, read_instruction_rows(recipe, settings, arguments.data, files))
    run_recipe(recipe, data, arguments.output_dir, SYNTHESIZED)


if __name__ == "__main__":
    main()
