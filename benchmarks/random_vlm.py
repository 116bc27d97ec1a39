"""A vision-language model of transformers' classes with random weights, for benchmarks that must not download anything.

python benchmarks/random_vlm.py qwen3-vl-2b FOLDER    # FOLDER/model, with its processor
"""

import inspect
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "tests"), str(PROJECT / "benchmarks")]

import torch  # noqa: E402
import transformers as T  # noqa: E402
from random_mgm import WORDS  # noqa: E402
from tiny_families import BUILDERS, TEMPLATES, rope  # noqa: E402
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # noqa: E402

from dj2mgm.vlm.processors import without_video  # noqa: E402

# family in tests/tiny_families.py, and what of its configuration, image processor and processor is of full size
SHAPES = {
    "qwen3-vl-2b": (
        "qwen3_vl",
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144}
        | {"rope_parameters": rope([24, 20, 20], mrope_interleaved=True)},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
        | {"num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17], "patch_size": 16},
        {"size": {"shortest_edge": 256**2, "longest_edge": 4096**2}},
        {},
    ),
    "qwen2.5-vl-3b": (
        "qwen2_5_vl",
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
        | {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000}
        | {"rope_parameters": rope([16, 24, 24])},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
        | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        {"size": {"shortest_edge": 56**2, "longest_edge": 3584**2}},
        {},
    ),
    "smolvlm2-2.2b": (
        "smolvlm",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
        | {"num_key_value_heads": 32, "head_dim": 64, "vocab_size": 49280, "max_position_embeddings": 8192},
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
        | {"image_size": 384, "patch_size": 14},
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
        {"image_seq_len": 81},
    ),
    "internvl3.5-2b": (
        "internvl",
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"image_size": [448, 448], "patch_size": [14, 14]},
        {"size": {"height": 448, "width": 448}, "max_patches": 12},
        {"image_seq_length": 256},
    ),
    "llava-1.5-7b": (
        "llava",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32064},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"image_size": 336, "patch_size": 14, "projection_dim": 768},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {"patch_size": 14},
    ),
    # to try a benchmark without a GPU
    "tiny": ("qwen3_vl", {}, {}, {}, {}),
}
MORE = {"smolvlm2-2.2b": {"scale_factor": 3}, "internvl3.5-2b": {"image_seq_length": 256}}
MORE |= {"llava-1.5-7b": {"image_seq_length": 576}}


def save_random_vlm(shape: str, folder: Path) -> None:
    """In bf16, made on the GPU if there is one. Each of WORDS is one token."""
    family, text, vision, pixels, given = SHAPES[shape]
    torch.manual_seed(0)
    config, images, tokenizer, more = BUILDERS[family]()
    tokenizer.add_tokens([T.AddedToken(word, lstrip=True, normalized=False) for word in WORDS])
    parts = {
        "text_config": config.text_config.to_dict() | text,
        "vision_config": config.vision_config.to_dict() | vision,
    }
    vocabulary = parts["text_config"].get("vocab_size", 0)
    parts["text_config"]["vocab_size"] = max(vocabulary, len(tokenizer))
    config = type(config)(**config.to_dict() | parts | MORE.get(shape, {}))
    images = type(images)(
        **images.to_dict() | pixels | ({"patch_size": vision["patch_size"]} if "depth" in vision else {})
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = T.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    stock = getattr(T, PROCESSOR_MAPPING_NAMES[family])
    none = {"video_processor": None} if "video_processor" in inspect.signature(stock.__init__).parameters else {}
    processor = without_video(stock)(
        image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATES[family], **none, **more | given
    )
    processor.save_pretrained(folder / "model")


if __name__ == "__main__":
    save_random_vlm(sys.argv[1], Path(sys.argv[2]))
