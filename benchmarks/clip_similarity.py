"""Compare the speed of Data-Juicer's image-text similarity filter and this workflow's batched filter on the same pairs.

    python benchmarks/clip_similarity.py results/foundation/tiny/clip
    python benchmarks/clip_similarity.py --vit-b-32 --rows 4000 --stock-rows 400

It draws image-text pairs of the embedded dataset into a temporary folder and scores them with both operators, batch by
batch as `Dataset.map` does in one process. It prints rows/s (without model loading and one warm-up batch), the ratio,
and the largest difference between their scores. The stock operator scores the first `--stock-rows` rows only, because
its time per row does not depend on their number.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "workflow_scripts"))

import dj2mgm.juicer.operators  # noqa: E402, F401  (registers the batched operator)
from dj2mgm.data.shapes import write_shapes  # noqa: E402
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset  # noqa: E402
from dj2mgm.juicer.patched_data_juicer import OP, Fields, load_ops, prepare_process  # noqa: E402
from dj2mgm.settings.dataset_files import FaultRates  # noqa: E402
from dj2mgm.storage.files import read_jsonl  # noqa: E402

STOCK, BATCHED = "image_text_similarity_filter", "batched_image_text_similarity_filter"
STAT = "image_text_similarity"


def draw_pairs(rows: int, folder: Path) -> list[dict]:
    """Draw pairs in Data-Juicer's format, with readable images and the default dataset's share of wrong captions."""
    embedded = resolve_dataset("shapes").settings
    write_shapes(
        embedded.model_copy(update={"pretrain_pairs": rows, "fault_rates": FaultRates(mismatched=0.1)}), folder
    )
    return [
        {"text": row["text"], "images": [str(folder / image) for image in row["images"]]}
        for row in read_jsonl(folder / "pretrain.jsonl")
    ]


def write_vit_b_32(folder: Path) -> None:
    """Write a random CLIP of the size of ViT-B/32 (151 million parameters), with a tokenizer of single characters."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config={"eos_token_id": 1, "bos_token_id": 0})).save_pretrained(folder)
    characters = [chr(code) for code in range(33, 127)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{character}</w>" for character in characters)]
    tokenizer = CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    CLIPProcessor(image_processor=CLIPImageProcessorPil(), tokenizer=tokenizer).save_pretrained(folder)


def score(operator: OP, rows: list[dict]) -> tuple[np.ndarray, float]:
    """Return scores (N,) and their seconds, after a warm-up on the first batch."""
    batches = [rows[start : start + operator.batch_size] for start in range(0, len(rows), operator.batch_size)]
    _score_batch(operator, batches[0])
    start_time = perf_counter()
    scores = [value for batch in batches for value in _score_batch(operator, batch)]
    return np.array(scores), perf_counter() - start_time


def _score_batch(operator: OP, rows: list[dict]) -> list[float]:
    samples = {key: [row[key] for row in rows] for key in ("text", "images")} | {Fields.stats: [{} for _ in rows]}
    arguments = {"rank": 0} if operator.use_cuda() else {}
    return [stats[STAT][0] for stats in operator.compute_stats(samples, **arguments)[Fields.stats]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("clip", nargs="?", help="folder of a CLIP with safetensors weights")
    model.add_argument("--vit-b-32", action="store_true", help="use a random CLIP of the size of ViT-B/32")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--stock-rows", type=int, help="rows that the stock operator scores (default: all)")
    parser.add_argument("--batch-size", type=int, default=128, help="batch size of the batched operator")
    arguments = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clip = arguments.clip
        if arguments.vit_b_32:
            clip = str(folder / "clip")
            write_vit_b_32(folder / "clip")
        rows = draw_pairs(arguments.rows, folder / "pairs")
        stock_rows = rows[: arguments.stock_rows]
        [stock, batched] = load_ops([{STOCK: {"hf_clip": clip}}, {BATCHED: {"hf_clip": clip}}])
        batched.batch_size = arguments.batch_size
        print(f"{clip} on {'CUDA' if batched.use_cuda() else 'the CPU'}, batches of {batched.batch_size}")
        values, seconds = score(batched, rows)
        stock_values, stock_seconds = score(stock, stock_rows)
    rate, stock_rate = len(rows) / seconds, len(stock_rows) / stock_seconds
    print(f"{STOCK}: {stock_rate:.1f} rows/s ({len(stock_rows)} of {len(rows)} rows in {stock_seconds:.1f} s)")
    print(f"{BATCHED}: {rate:.1f} rows/s ({len(rows)} rows in {seconds:.1f} s)")
    difference = np.abs(values[: len(stock_rows)] - stock_values).max()
    print(f"ratio {rate / stock_rate:.1f}, max |difference| {difference:.2e}")


if __name__ == "__main__":
    main()
