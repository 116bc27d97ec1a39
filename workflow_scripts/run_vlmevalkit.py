r"""Run VLMEvalKit on a model of this workflow under the name dj2mgm; further flags are passed to its run.py.

    python workflow_scripts/run_vlmevalkit.py --kit ../VLMEvalKit --model results/models/tiny/mgm \
        --finetuned results/shapes/tiny/baseline/finetune --template gemma --data MMStar

`--kit` is a checkout of https://github.com/open-compass/VLMEvalKit. Its requirements must be installed in addition to
the packages of envs/evaluate.yaml. For several GPUs, use
`torchrun --nproc-per-node 4 workflow_scripts/run_vlmevalkit.py …`.
"""

import runpy
import sys
from functools import partial
from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.errors import InputError
from dj2mgm.settings.chat_templates import OF_THE_TOKENIZER

NAME = "dj2mgm"


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    for flag in ("--kit", "--model"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--finetuned", type=Path)
    parser.add_argument("--template", default=OF_THE_TOKENIZER)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--data", nargs="+", required=True, help="names of VLMEvalKit's benchmarks")
    args, others = parser.parse_known_args()
    if not (args.kit / "run.py").is_file():
        raise InputError(f"--kit: there is no {args.kit / 'run.py'}; name a checkout of VLMEvalKit")
    sys.path.insert(0, str(args.kit))
    try:
        from vlmeval.config import supported_VLM

        from dj2mgm.evaluation.harnesses.vlmevalkit import VLMEvalKitModel
    except ImportError as error:
        raise InputError(f"VLMEvalKit cannot be imported ({error}); install its requirements first") from None
    folders = {"model": args.model, "finetuned": args.finetuned}
    supported_VLM[NAME] = partial(
        VLMEvalKitModel, **folders, template=args.template, max_new_tokens=args.max_new_tokens
    )
    sys.argv = [str(args.kit / "run.py"), "--model", NAME, "--data", *args.data, *others]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
