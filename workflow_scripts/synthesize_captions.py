r"""Rewrite captions that do not fit their image with a Data-Juicer recipe, and keep the rows that fit afterwards.

    python workflow_scripts/synthesize_captions.py --config results/dj_synth/synthesize/config.yaml \
        --data results/baseline/filter/filtered.jsonl \
        --captioner-model results/models/tiny/mgm --captioner-stage results/baseline/pretrain \
        --output-dir results/dj_synth/synthesize

`--instructions results/datasets/shapes/finetune.json` is for a recipe with `rows: instructions`, which selects them.

Only the captioner mgm, a model that this workflow has trained, needs the two captioner flags.

Writes synthesized.jsonl, stats.jsonl, dropped.jsonl and summary.json. New captions are also kept in the folder
`captions` of the settings, so that a killed or changed run does not request them again.
"""

import sys

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from transformers.utils import logging as transformers_log

    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.config.settings.data import SynthesizeSettings
    from dj2mgm.config.settings.validation import load_settings
    from dj2mgm.data.formats import read_llava
    from dj2mgm.data.instruction_rows import INPUT, convert_instructions
    from dj2mgm.errors import InputError
    from dj2mgm.files import write_jsonl
    from dj2mgm.juicer.changed_data_juicer import prepare_process
    from dj2mgm.juicer.recipe_settings import CaptionerModel, prepare_synthesis
    from dj2mgm.juicer.recipe_stage import SYNTHESIZED, configure_log, run_recipe


@command_line
def main() -> None:
    captioner = ("--captioner-model", "--captioner-stage")
    arguments = parse_paths(__doc__, "--config", "--data", "--output-dir", optional=(*captioner, "--instructions"))
    if (arguments.captioner_model is None) != (arguments.captioner_stage is None):
        raise InputError("--captioner-model and --captioner-stage belong together. Give both or neither")
    model = arguments.captioner_model and CaptionerModel(arguments.captioner_model, arguments.captioner_stage)
    settings = load_settings(SynthesizeSettings, arguments.config)
    recipe = prepare_synthesis(arguments.config, settings, arguments.output_dir, model)
    configure_log()
    if not sys.stderr.isatty():
        transformers_log.disable_progress_bar()
    prepare_process()
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)
    data = arguments.data
    if arguments.instructions:
        data = arguments.output_dir / INPUT
        write_jsonl(data, convert_instructions(read_llava(arguments.instructions)))
    run_recipe(recipe, data, arguments.output_dir, SYNTHESIZED)


if __name__ == "__main__":
    main()
