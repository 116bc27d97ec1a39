"""Hostile values for every argument of a recipe, and a sandbox that runs the accepted values.

python tests/support/recipe_fuzzing.py        # the full cross product; prints attempts and findings
"""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from paths import PROJECT

sys.path.insert(0, str(PROJECT / "workflow_scripts"))

from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.recipes.catalogue import read_allowed_operators
from dj2mgm.recipes.recipe_parsing import parse_recipe
from dj2mgm.storage.files import write_jsonl

SANDBOX = PROJECT / "tests/support/recipe_sandbox.py"
# arguments that an operator needs in every case to have an effect; the folders are made by `prepare`
BASE: dict[str, dict] = {
    "batched_image_text_similarity_filter": {"hf_clip": "clip"},
    "cluster_balance_filter": {"hf_clip": "clip", "keep_rows": 1},
    "image_captioning_mapper": {"hf_img2seq": "blip2", "keep_original_sample": False},
    "image_embedding_deduplicator": {"hf_clip": "clip"},
    "image_nsfw_filter": {"hf_nsfw_model": "vit"},
    "image_shape_filter": {"min_width": 1},
    "image_size_filter": {"min_size": "1"},
    "image_text_matching_filter": {"hf_blip": "blip"},
    "image_text_similarity_filter": {"hf_clip": "clip"},
    "image_watermark_filter": {"hf_watermark_model": "vit"},
    "length_balance_filter": {"keep_rows": 1},
    "likelihood_gain_filter": {"base_model": "mgm/base", "stage": "mgm/pretrain", "other_images": 1},
    "low_similarity_recaption_mapper": {
        "hf_clip": "clip",
        "keep_fraction": 0.5,
        "captioner": {
            "mgm_captioning_mapper": {"base_model": "mgm/base", "stage": "mgm/pretrain", "max_new_tokens": 3}
        },
    },
    "mgm_captioning_mapper": {"base_model": "mgm/base", "stage": "mgm/pretrain", "max_new_tokens": 3},
    "ngram_balance_filter": {"keep_rows": 1},
    "random_selector": {"select_ratio": 0.5},
    "range_specified_field_selector": {"field_key": "__dj__stats__.text_len", "lower_rank": 1, "upper_rank": 2},
    "remove_long_words_mapper": {"max_len": 100},
    "replace_content_mapper": {"pattern": "boat"},
    "topk_specified_field_selector": {"field_key": "__dj__stats__.text_len", "topk": 1},
}
# operators that compute the statistic by which another operator selects
BEFORE = [{"text_length_filter": {"min_len": 0}}]


def list_hostile_values(decoys: Path) -> dict[str, list[object]]:
    """Return an attacker's values by kind, with files and folders in `decoys` as targets."""
    file, touch = decoys / "model.pt", f"__import__('os').system('touch {decoys}/ran')"
    code = f"lambda s: [{touch}]"
    hub = ["evil/model", "openai/clip-vit-base-patch32", "EleutherAI/pythia-6.9b-deduped", "gpt2", "hf://x/y"]
    up = ["../decoys", "../decoys/model.pt", "./../decoys/new", "data/../../decoys", "en/../../../decoys", "~", "~root"]
    odd = [".", "..", "/", "/dev/stdin", "/proc/self/environ", "decoys\x00.json", "a\\..\\b", "linked", "linked/new"]
    addresses = ["http://127.0.0.1:9/x", "https://evil.example/x", "127.0.0.1:9", "localhost:9", "s3://bucket/x"]
    addresses += ["ftp://evil.example", "//evil.example/share", "redis://127.0.0.1:6379/0", "ray://127.0.0.1:10001"]
    statistics = ["__dj__stats__.text_len", "__dj__stats__.__class__", "__dj__meta__", "input_row", "text_len", "id"]
    patterns = ["(a+)+$", "(?R)", "\\g<0>", "\\1", ".*", "a" * 201, "a" * 10**6, "\u202e", "\ud800"]
    numbers = [math.nan, math.inf, -math.inf, 1e308, -1e308, 10**400, -(10**400), 2**63, 2**63 - 1, 2**31]
    words = ["sentencepiece", "space", "all", "zh", "EN", "a boat", "red", "NFKD", "s2t", "gemma", "../gemma", "20MiB"]
    return {
        "code": [code, f" \n(({code}))", f"[{code}][0]", f"{{0: {code}}}[0]", f"(x := {code})", f"# c\n{code}", touch],
        "nested code": [[[code]], {"tokenizer": code}, {"remove_repeat_sentences_mapper": {"tokenizer": code}}],
        "templates": ["{{ ''.__class__.__mro__ }}", "{% for x in range(10**9) %}{% endfor %}", "{0.__class__}", "%s%n"],
        "decoys": [str(file), str(decoys), f"{decoys}/new", f"file://{file}", f" {file}", "model.pt", "en.sp.model"],
        "paths": up + odd,
        "addresses": addresses + hub,
        "tokens": ["<image>", "<__dj__image>", "<|im_end|>"],
        "patterns": patterns,
        "columns": statistics + ["images", "text"],
        "numbers": [*numbers, 32, -1, 0, 1, 0.0, 0.5, 1.5, "0", "1e9", "1TB", "//"],
        "empty": [True, False, None, "", " ", [], {}, [None], "true", "null"],
        "words": [*words, ["red", "boat"], [""], ["x"] * 101],
    }


def generate_cases(decoys: Path, full: bool = True) -> Iterator[tuple[str, str, object]]:
    """Yield (operator, argument, value) for every argument of the allowed operators, including forbidden arguments.

    Args:
        decoys: folder that the values name.
        full: whether arguments get every value, not only a third of each kind, and forbidden ones not only one.
    """
    kinds = list_hostile_values(decoys).values()
    values = [value for kind in kinds for value in (kind if full else kind[::3])]
    for operator in read_allowed_operators().values():
        for argument in dict.fromkeys((*operator.arguments, *operator.defaults, "trust_remote_code", "captioner")):
            for value in values if full or argument in operator.arguments else values[:1]:
                yield operator.name, argument, value


def make_process(operator: str, argument: str, value: object) -> list[dict]:
    return [*BEFORE, {operator: BASE.get(operator, {}) | {argument: value}}]


def is_accepted(process: list[dict], folders: tuple[str, ...] = ()) -> bool:
    """Return whether Snakemake's check accepts a recipe; raise any error except InputError."""
    try:
        parse_recipe("recipe", {"process": process}, folders=folders)
    except InputError:
        return False
    return True


def prepare(folder: Path, models: bool = True) -> None:
    """Write two rows and tiny models to `work/`, and files that must not change to `decoys/`."""
    work, decoys = folder / "work", folder / "decoys"
    for new_folder in (folder, work, work / "tmp", work / "data"):
        new_folder.mkdir(exist_ok=True)
        new_folder.chmod(0o755)
    rows = []
    for color, caption in {"red": "a red boat on water", "blue": "two dogs and 3 cats"}.items():
        Image.new("RGB", (40, 32), color).save(work / f"data/{color}.png")
        rows.append({"id": color, "text": build_dj_text(caption), "images": [f"{color}.png"]})
    write_jsonl(work / "data/pairs.jsonl", rows)
    decoys.mkdir()
    for name in ("model.pt", "weights.bin", "en.sp.model", "secret.json", "model.safetensors"):
        (decoys / name).write_bytes(b"a decoy that no model loads")
    (work / "linked").symlink_to(decoys)
    if models:
        from tiny_captioners import save_tiny_blip2, save_tiny_mgm
        from tiny_clip import save_tiny_clip

        save_tiny_clip(work / "clip")
        save_tiny_mgm(work / "mgm")
        save_tiny_blip2(work / "blip2")
        _save_tiny_classifier(work / "vit")
        _save_tiny_matcher(work / "blip", work / "clip")


def run_cases(folder: Path, cases: list[tuple[list[dict], bool]]) -> list[dict]:
    """Run recipes in the sandbox like the filter stage does, and return a finding for each.

    Args:
        folder: the folder that `prepare` has made.
        cases: a `process` list, and whether it is trusted.
    """
    packages = [str(PROJECT / "workflow_scripts"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, packages))}
    home = folder / "work"
    environment |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "DATA_JUICER_CACHE_HOME": str(home / "cache")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(home / "tmp/inductor")}  # torch creates it with the first model
    findings: list[dict] = []
    while len(findings) < len(cases):
        first = len(findings)
        command, remaining_cases = [sys.executable, SANDBOX, folder], json.dumps(cases[first:])
        process = subprocess.run(command, input=remaining_cases, capture_output=True, text=True, env=environment)
        lines = [json.loads(line) for line in process.stdout.splitlines()]
        findings += [line | {"case": first + line["case"]} for line in lines]
        if process.returncode:
            if not lines:
                raise RuntimeError(process.stderr[-3000:])
            outcome = f"failed: the process ended with {process.returncode}"
            findings.append({"case": len(findings), "outcome": outcome, "seconds": 0.0, "events": [], "changed": []})
    return findings


def _save_tiny_classifier(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    config = ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def _save_tiny_matcher(folder: Path, clip: Path) -> None:
    from transformers import BertTokenizer, BlipConfig, BlipForImageTextRetrieval, BlipImageProcessorPil, BlipProcessor

    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tower | {"vocab_size": 40, "encoder_hidden_size": 16, "max_position_embeddings": 64, "projection_dim": 8}
    config = BlipConfig(text_config=text, vision_config=tower | {"image_size": 32, "patch_size": 16})
    BlipForImageTextRetrieval(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    BlipProcessor(BlipImageProcessorPil(size={"height": 32, "width": 32}), tokenizer).save_pretrained(folder)


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        os.chdir(folder / "work")
        case_count, accepted = 0, []
        for operator, argument, value in generate_cases(folder / "decoys"):
            case_count += 1
            process = make_process(operator, argument, value)
            if is_accepted(process, (".",)):
                accepted.append(process)
        print(
            f"{case_count} cases, {case_count - len(accepted)} refused by the check, {len(accepted)} accepted and run"
        )
        findings = run_cases(folder, [(process, False) for process in accepted])
    outcomes = Counter(finding["outcome"].split(":")[0] for finding in findings)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    failures = [
        finding
        for finding in findings
        if finding["events"] or finding["changed"] or finding["outcome"].startswith("failed")
    ]
    for finding in findings:
        if finding in failures or finding["seconds"] > 20:
            print(json.dumps(accepted[finding["case"]][-1])[:300], json.dumps(finding)[:900])
    print(f"{len(failures)} reached outside of their folder, or failed without a sentence")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
