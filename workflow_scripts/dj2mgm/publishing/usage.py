"""Instructions to load a published model with stock libraries, as far as they support it."""

from dj2mgm.publishing.stock_weights import LANGUAGE_MODEL, STAGE

IMPORTS = """from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.image_utils import load_image"""
MERGED = "model = AutoModelForImageTextToText.from_pretrained(FOLDER)"
ADAPTED = """from peft import PeftConfig, PeftModel
from transformers import GenerationConfig

base = PeftConfig.from_pretrained(FOLDER).base_model_name_or_path
model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), FOLDER).eval()
model.generation_config = GenerationConfig.from_pretrained(FOLDER)"""
CHAT = """content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
)"""
PREFIX = """inputs = processor(text=processor.image_token + QUESTION, images=image, return_tensors="pt")"""
ANSWER = """answer = model.generate(**inputs, generation_config=model.generation_config)[0]
print(processor.decode(answer[inputs["input_ids"].shape[1]:], skip_special_tokens=True).strip())"""


def library(settings: dict) -> str:
    """Return the hub's name of the library that loads the folder."""
    if settings["weights"] == "adapter":
        return "peft"
    return "dj2mgm" if settings["mgm"] else "transformers"


def how_to_use(settings: dict, adapter: bool, chat: bool) -> list[str]:
    return _use_mgm(settings, adapter) if settings["mgm"] else _use_transformers(settings, chat)


def _use_transformers(settings: dict, chat: bool) -> list[str]:
    load, with_peft = (ADAPTED, " with PEFT") if settings["weights"] == "adapter" else (MERGED, "")
    return [
        f"Transformers loads it{with_peft}, without running code from this repository.",
        "",
        "```python",
        IMPORTS,
        "",
        'FOLDER = "."  # this folder, or the name of this repository',
        f"QUESTION = {settings['question'] or 'Describe the image.'!r}",
        load,
        "processor = AutoProcessor.from_pretrained(FOLDER, backend='pil')  # the same pixels as in training",
        'image = load_image("photo.jpg")  # turned by its EXIF orientation, as in training',
        CHAT if chat else PREFIX,
        ANSWER,
        "```",
    ]


def _use_mgm(settings: dict, adapter: bool) -> list[str]:
    """Return the instructions for MGM, which has no class in transformers."""
    merged = settings["weights"] == "merged"
    lines = [
        "**Transformers has no class for this model (MGM), and this repository contains no code.** Use the project "
        "dj2mgm to ask it about images:",
        "",
        "```bash",
    ]
    if merged:
        lines += ["python workflow_scripts/chat.py --model FOLDER --image photo.jpg --question 'What is this?'", "```"]
    else:
        lines += [
            "# BASE: the assembled model before training (docs/models.md)",
            f"python workflow_scripts/merge_adapter.py --model BASE --stage FOLDER/{STAGE} --output-dir merged",
            "python workflow_scripts/chat.py --model merged --image photo.jpg --question 'What is this?'",
            "```",
        ]
    if adapter:
        folder = f"FOLDER/{LANGUAGE_MODEL}" if merged else "FOLDER"
        base = settings["adapter_base"] or "LANGUAGE_MODEL"
        lines += [
            "",
            "Stock transformers and PEFT load the fine-tuned changes to the language model, which alone sees no "
            "images:",
            "",
            "```python",
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f"BASE, ADAPTER = {base!r}, {folder!r}",
            "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), ADAPTER)",
            "```",
        ]
    return lines
