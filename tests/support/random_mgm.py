"""Make an MGM of random weights, and conversations about random images, for benchmarks without downloads.

    python tests/support/random_mgm.py mgm-2b FOLDER    # FOLDER/mgm, and FOLDER/projector.safetensors of a stage 1

A process of its own may run it, so that its memory is not counted.
"""

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow_scripts"
sys.path.insert(0, str(SCRIPTS))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, ConvNextConfig, GemmaConfig  # noqa: E402

from dj2mgm.features.foundation.tiny_parts import GEMMA_IMAGE_TOKEN, train_gemma_tokenizer  # noqa: E402
from dj2mgm.models.mgm import MGMConfig, MGMForConditionalGeneration, MGMProcessor  # noqa: E402
from dj2mgm.models.trained_weights import find_projector_parameters  # noqa: E402
from dj2mgm.storage.files import write_jsonl  # noqa: E402

WORDS = [f"{first}{second}" for first in ("ba", "de", "ki", "lo", "mu") for second in ("ra", "se", "ti", "vo", "nu")]
IMAGES = 256

# keyword arguments of (GemmaConfig, CLIPVisionConfig, ConvNextConfig), and the side of the images in pixels
SHAPES = {
    # Gemma-2B; CLIP ViT-L/14 at 336; ConvNeXt-L at 768
    "mgm-2b": (
        {"vocab_size": 256_000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
        | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"image_size": 336, "patch_size": 14, "projection_dim": 768},
        {"hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3]},
        768,
    ),
    # to try a benchmark without a GPU
    "tiny": (
        {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        | {"image_size": 32, "patch_size": 8},
        {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1]},
        64,
    ),
}


def make_random_mgm(shape: str, folder: Path) -> int:
    """Fill a folder in a new process, which leaves nothing on the GPU; return the number of tokens of an image."""
    subprocess.run([sys.executable, __file__, shape, folder], check=True)
    return MGMConfig.from_pretrained(folder / "mgm").num_image_tokens


def save_random_mgm(shape: str, folder: Path) -> None:
    """Save an assembled model in bf16, made on the GPU if there is one, because a CPU would take minutes."""
    text, vision, vision_aux, side = SHAPES[shape]
    torch.manual_seed(0)
    tokenizer = train_gemma_tokenizer([" ".join(WORDS)], [])
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = MGMConfig(
        text_config=GemmaConfig(**text, **tokens),
        vision_config=CLIPVisionConfig(**vision),
        vision_aux_config=ConvNextConfig(**vision_aux),
        image_size_aux=side,
        image_token_id=tokenizer.convert_tokens_to_ids(GEMMA_IMAGE_TOKEN),
        dtype="bfloat16",
        **tokens,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = MGMForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder / "mgm")
    projector = {name: parameter.detach().contiguous() for name, parameter in find_projector_parameters(model).items()}
    save_file(projector, folder / "projector.safetensors")
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    MGMProcessor(image_processor, tokenizer, GEMMA_IMAGE_TOKEN, config.num_image_tokens).save_pretrained(folder / "mgm")


def measure_instruction_lengths(rows: int) -> list[tuple[int, int]]:
    """Return numbers of words of questions (5 to 60) and answers (log-normal around 60 with σ 1)."""
    random = np.random.default_rng(1)
    answer_words = random.lognormal(np.log(60), 1.0, rows).clip(1, 430)
    return list(zip(random.integers(5, 61, rows).tolist(), answer_words.astype(int).tolist(), strict=True))


def write_conversations(data: Path, lengths: list[tuple[int, int]]) -> None:
    """Write conversations about JPEG images of 640×480 pixels.

    Args:
        data: jsonl file to write; images are written to the folder `images` next to it.
        lengths: words of question and answer of each conversation.
    """
    folder, random = data.parent, np.random.default_rng(0)
    for index in range(IMAGES):
        path = folder / "images" / f"{index}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            noise.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)

    write_jsonl(
        data,
        (
            {
                "id": str(row),
                "image": str(folder / "images" / f"{row % IMAGES}.jpg"),
                "conversations": [
                    {"from": "human", "value": "<image>\n" + " ".join(random.choice(WORDS, question_words))},
                    {"from": "gpt", "value": " ".join(random.choice(WORDS, answer_words))},
                ],
            }
            for row, (question_words, answer_words) in enumerate(lengths)
        ),
    )


if __name__ == "__main__":
    save_random_mgm(sys.argv[1], Path(sys.argv[2]))
