"""Compare the tiny models shipped with the workflow with newly trained models, or replace them.

    python benchmarks/foundation.py                                    # train with three seeds, and compare
    python benchmarks/foundation.py --ship results/foundation/tiny     # ship the parts that were trained there

Two figures are printed for the shipped parts and for the parts of each seed, on unseen scenes. The first is how often
CLIP finds an image's own caption nearer than another scene's caption. The second is how often the language model, which
reads the board of the scene, finds the right next token of captions and answers most likely. A seed's training takes
about ten minutes on two cores.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "workflow_scripts"))

from dj2mgm.torch_environment import set_torch_environment  # noqa: E402

set_torch_environment()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPModel, CLIPProcessor  # noqa: E402

from dj2mgm.compute import set_seed, use_cpu_threads  # noqa: E402
from dj2mgm.data.shapes import (  # noqa: E402
    describe_scene,
    draw_image,
    draw_row_scene,
)
from dj2mgm.features.foundation.tiny_parts import (  # noqa: E402
    draw_training_example,
    load_chat_templates,
    train_clip,
    train_language_model,
)
from dj2mgm.model_files.missing_models import FOUNDATION_SETTINGS  # noqa: E402
from dj2mgm.models.vision_language import IGNORE_INDEX  # noqa: E402
from dj2mgm.runs.layers import merge_experiment  # noqa: E402
from dj2mgm.settings.models import Foundation  # noqa: E402
from dj2mgm.storage.files import write_json  # noqa: E402
from unpack_foundation import copy_parts  # noqa: E402

SHIPPED = PROJECT / "config" / "foundation" / "tiny"
SEEDS = (1234, 1, 2)  # the first is the seed of config/models/tiny.yaml
SCENES = 512
UNSEEN = 987_654_321  # seed of scenes that no training uses


def read_foundation() -> Foundation:
    """Return `foundation` of config/models/tiny.yaml."""
    return merge_experiment("baseline", {"model": "tiny"}).model.foundation


@torch.inference_mode()
def measure_clip(folder: Path) -> float:
    """Return the share of pairs of an image and a wrong caption whose similarity is below the right caption's."""
    model, processor = CLIPModel.from_pretrained(folder, dtype=torch.float32), CLIPProcessor.from_pretrained(folder)
    scenes = [draw_row_scene(UNSEEN, "foundation", index) for index in range(SCENES)]
    captions = [describe_scene(scene) for scene in scenes]
    inputs = processor(
        text=captions,
        images=[draw_image(scene) for scene in scenes],
        padding=True,
        truncation=True,
        return_tensors="pt",
    )
    output = model(**inputs)
    similarity = F.normalize(output.image_embeds) @ F.normalize(output.text_embeds).T
    is_nearer = similarity.diagonal()[:, None] > similarity
    is_other = torch.tensor([[a != b for b in captions] for a in captions])
    return (is_nearer & is_other).sum().item() / is_other.sum().item()


@torch.inference_mode()
def measure_language_model(folder: Path, side: int) -> float:
    """Return the share of tokens of captions and answers that the language model finds most likely."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    templates, rng = load_chat_templates(tokenizer), random.Random(UNSEEN)
    correct = total = 0
    for index in range(SCENES):
        ids, labels = [tokenizer.bos_token_id], [IGNORE_INDEX]
        for text, is_answer in draw_training_example(draw_row_scene(UNSEEN, "foundation", index), side, templates, rng):
            tokens = tokenizer(text, add_special_tokens=False).input_ids
            ids += tokens
            labels += tokens if is_answer else [IGNORE_INDEX] * len(tokens)
        predictions = model(input_ids=torch.tensor([ids])).logits[0, :-1].argmax(-1)
        expected = torch.tensor(labels[1:])
        correct += (predictions == expected).sum().item()
        total += (expected != IGNORE_INDEX).sum().item()
    return correct / total


def measure_parts(folder: Path, side: int) -> dict[str, float]:
    return {
        "clip": round(measure_clip(folder / "clip"), 4),
        "language_model": round(measure_language_model(folder / "language_model", side), 4),
    }


def train(seed: int, foundation: Foundation, folder: Path) -> None:
    set_seed(seed)
    train_clip(foundation.clip.model_copy(update={"seed": seed}), folder / "clip", folder / "convnext")
    set_seed(seed)
    (folder / "language_model").mkdir()
    train_language_model(foundation.language_model.model_copy(update={"seed": seed}), folder / "language_model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ship", type=Path, help="folder with clip/, convnext/ and language_model/")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    arguments = parser.parse_args()
    use_cpu_threads(None)
    foundation = read_foundation()
    side = foundation.language_model.patches_per_side
    if arguments.ship:
        copy_parts(arguments.ship, SHIPPED, torch.bfloat16)
        write_json(SHIPPED / FOUNDATION_SETTINGS, foundation.model_dump())
    print(json.dumps({"shipped": measure_parts(SHIPPED, side)}), flush=True)
    for seed in () if arguments.ship else arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            train(seed, foundation, Path(folder))
            print(json.dumps({f"seed {seed}": measure_parts(Path(folder), side)}), flush=True)


if __name__ == "__main__":
    main()
