"""Make a vision-language model of transformers with random weights, for benchmarks without downloads.

python benchmarks/random_vlm.py qwen3-vl-2b-instruct FOLDER    # FOLDER/model, with its processor
"""

import shutil
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "tests/support")]

import torch  # noqa: E402
from transformers import AddedToken, AutoConfig, AutoModelForImageTextToText, AutoTokenizer  # noqa: E402

from random_mgm import WORDS  # noqa: E402
from tiny_families import save_tiny_family  # noqa: E402

ARCHITECTURES = PROJECT / "config/architectures"
TINY = "tiny"  # to try a benchmark without a GPU
SHAPES = [*sorted(path.name for path in ARCHITECTURES.iterdir() if path.is_dir()), TINY]


def save_random_vlm(shape: str, folder: Path) -> None:
    """Save a random model in bf16, made on the GPU if there is one. Each of WORDS is one token, also after a space."""
    if shape == TINY:
        save_tiny_family("qwen3_vl", folder)
    else:
        shutil.copytree(ARCHITECTURES / shape, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(f"{space}{word}", normalized=False) for word in WORDS for space in ("", " ")])
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    text.vocab_size = max(text.vocab_size, len(tokenizer))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    save_random_vlm(sys.argv[1], Path(sys.argv[2]) / "model")
