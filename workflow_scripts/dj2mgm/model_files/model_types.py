"""Types of vision-language models that transformers loads, and checks of a folder that need no library."""

from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import has_chat_template
from dj2mgm.settings.chat_templates import WITHOUT_CHAT
from dj2mgm.settings.config_files import read_json_config

# types of transformers' AutoModelForImageTextToText; a test compares them with the installed version
VISION_LANGUAGE_TYPES = frozenset(
    """
    aria aya_vision blip blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2
    deepseek_vl deepseek_vl_hybrid diffusion_gemma dots3_note emu3 ernie4_5_vl_moe evolla exaone4_5 fast_vlm
    florence2 fuyu gemma3 gemma3n gemma4 gemma4_unified git glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2
    granite4_vision granite_docling hunyuan_vl hyperclovax_vision_v2 idefics idefics2 idefics3 inkling2
    inkling_mm_model instructblip instructblipvideo internvl janus kimi_k25 kosmos-2 kosmos-2.5 lfm2_vl lfm3_vl
    lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7
    minimax_m3_vl mistral3 mistral4 mistral_large4 mllama molmo2 muse_glimmer muse_spark nemotron_h_omni ovis2
    paddleocr_vl paligemma perception_lm pi0 pix2struct pp_chart2table pp_formulanet qianfan_ocr
    qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    qwen4_exp shieldgemma2 smolvlm step3p7 t5gemma2 udop unlimited_ocr video_llama_3 video_llava vipllava
    vision-encoder-decoder
    """.split()
)
# model types of repositories whose code transformers does not contain: an example of their form for transformers
OTHER_FORMS = {
    "llava_llama": "llava-hf/llava-1.5-7b-hf",
    "llava_mistral": "llava-hf/llava-v1.6-mistral-7b-hf",
    "llava_qwen": "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
    "internvl_chat": "OpenGVLab/InternVL3_5-2B-HF",
}
ORIGINAL_LLAVA = "LlavaLlamaForCausalLM"  # the architecture of LLaVA's first versions, whose model type is `llava`


def read_model_type(config: dict) -> str | None:
    """Return the model type of a config.json; None if it states none, or no string."""
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else None


def check_format(location: str, config: dict) -> None:
    """Check that transformers, without code of the folder, reads a model with this config.json.

    Raises:
        InputError: the message begins with `location`, and names the form of the model that works.
    """
    kind, architectures = read_model_type(config), config.get("architectures")
    is_original = isinstance(architectures, list) and ORIGINAL_LLAVA in architectures
    form = OTHER_FORMS.get("llava_llama" if is_original else kind)
    if form:
        raise InputError(
            f"{location} is in a format that transformers does not read (model_type {kind}). Name the model's form for "
            f"transformers, such as {form}"
        )
    if config.keys() & {"vision_config", "mm_vision_tower", "auto_map"} and kind not in VISION_LANGUAGE_TYPES:
        code = ", and the code in its folder is never run" if "auto_map" in config else ""
        raise InputError(
            f"{location}: transformers has no vision-language model of the type {kind}{code}. Name a model of "
            "docs/models.md, or this model's form for transformers if its authors publish one"
        )


def check_vision_language_model(location: str, folder: Path) -> None:
    """Check the format of a complete model folder, and that it has a chat template; no download would help.

    Raises:
        InputError: the message begins with `location`.
    """
    config = read_json_config(folder / "config.json")
    check_format(location, config)
    if read_model_type(config) not in WITHOUT_CHAT and not has_chat_template(folder):
        raise InputError(
            f"{location}: {folder} has no chat template, without which no prompt can be written. Name the "
            "instruction-tuned model, or copy its chat_template.jinja into the folder"
        )
