"""Print the results of lmms-eval's own classes for a given answer, with only the model replaced.

    PYTHONPATH=.lmms_eval python tests/support/lmms_classes.py <answer> <until as JSON>

Print {type of model: returned answer} as JSON, from the classes that lmms-eval uses by default.
"""

import contextlib
import importlib.util
import json
import sys
from unittest.mock import MagicMock

import torch

for name in ("decord", "av", "qwen_vl_utils", "loguru"):  # packages for videos and logs
    sys.modules[name] = MagicMock()

import lmms_eval.models.simple.llava  # noqa: E402
from lmms_eval.api.instance import Instance  # noqa: E402
from lmms_eval.models import get_model  # noqa: E402
from PIL import Image  # noqa: E402

CLASSES = {  # families in tests/support/tiny_families.py, and others whose classes cut answers
    "llava": "llava_hf",
    "llava_onevision": "llava_hf",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "smolvlm": "huggingface",
    "internvl": "internvl_hf",
    "gemma3": "gemma3",
    "paligemma": "huggingface",
    "mgm": "llava",
    "qwen2_vl": "qwen2_vl",
    "glm4v": "glm4v",
    "llama4": "llama4_scout",
    "gemma4": "gemma4",
}
# names from LLaVA's own package
LLAVA_ATTRIBUTES = dict.fromkeys(("process_images", "conv_templates", "IMAGE_TOKEN_INDEX"), MagicMock())
LLAVA_ATTRIBUTES["tokenizer_image_token"] = lambda *args, **kwargs: torch.zeros(2, dtype=torch.long)
IMAGE = Image.new("RGB", (8, 8))
vars(lmms_eval.models.simple.llava).update(LLAVA_ATTRIBUTES)
if importlib.util.find_spec("torchvision") is None:  # after transformers has checked for the package
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = MagicMock()
sys.modules["qwen_vl_utils"].process_vision_info = lambda messages, return_video_kwargs=False, **kwargs: (
    ([IMAGE], None, {}) if return_video_kwargs else ([IMAGE], None)
)


class Tokens(dict):
    """Output of a processor with tokens under every name and on every device."""

    def __init__(self):
        super().__init__(input_ids=torch.zeros(1, 2, dtype=torch.long))
        self.input_ids = self["input_ids"]

    def to(self, *args, **kwargs):
        return self


def make_stand_in(cls: type, answer: str):
    """Return an object of the class without its model, which decodes the answer from all tokens."""
    reader = MagicMock(side_effect=lambda *args, **kwargs: Tokens())
    reader.batch_decode.return_value = [answer]
    reader.decode.return_value = "</s>"
    reader.eos_token_id = reader.pad_token_id = 2
    reader.apply_chat_template.side_effect = lambda *args, **kw: Tokens() if kw.get("return_dict") else "asked"
    model = MagicMock()
    model.generate.return_value = torch.zeros(1, 4, dtype=torch.long)
    attributes = dict.fromkeys(("processor", "_processor", "tokenizer", "_tokenizer", "_image_processor"), reader)
    attributes |= {"model": model, "_model": model, "device": "cpu", "_device": "cpu", "device_map": "cpu"}
    attributes |= {"batch_size": 1, "batch_size_per_gpu": 1, "rank": 0, "world_size": 1, "eot_token_id": 2}
    attributes |= dict.fromkeys(("use_custom_video_loader", "enable_thinking", "reasoning_prompt"), False)
    attributes |= {"system_prompt": "", "task_dict": {"task": {"test": [{}]}}}
    # attributes of the class, so that its properties do not hide them
    defaults = {"__init__": lambda self: None, "__getattr__": lambda self, name: MagicMock()}
    return type(cls.__name__, (cls,), attributes | defaults)()


def generate_answer(name: str, answer: str, until: list[str]) -> str:
    cls = get_model(name)
    content = [{"type": "image", "url": IMAGE}, {"type": "text", "text": "asked"}]
    generation_kwargs = {"max_new_tokens": 64, "until": until}
    if cls.is_simple:
        arguments = ("asked", generation_kwargs, lambda doc: [IMAGE], 0, "task", "test")
    else:
        arguments = ("asked", lambda doc: [{"role": "user", "content": content}], generation_kwargs, 0, "task", "test")
    metadata = {"task": "task", "doc_id": 0, "repeats": 1}
    [result] = make_stand_in(cls, answer).generate_until([Instance("generate_until", arguments, 0, metadata)])
    return getattr(result, "text", result)


if __name__ == "__main__":
    answer, until = sys.argv[1], json.loads(sys.argv[2])
    with contextlib.redirect_stdout(sys.stderr):
        results = {kind: generate_answer(name, answer, until) for kind, name in CLASSES.items()}
    print(json.dumps(results))
