"""Vision-language models other than MGM, from the data to the report."""

import pandas as pd
import pytest

from dj2mgm.storage.files import read_json, read_yaml, write_yaml
from paths import PROJECT


@pytest.mark.slow
def test_model_without_stage_1_trains_on_all_data(fresh):
    model = read_yaml(PROJECT / "config/models/tiny-llava.yaml")
    del model["pretrain"]
    model["settings"]["finetune"] |= {"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 8}
    model["settings"]["finetune"] |= {"gradient_accumulation_steps": 1, "deepspeed": "zero3_offload"}
    model["settings"]["evaluate"]["max_new_tokens"] = 8
    write_yaml(fresh.folder / "config/models/one.yaml", model)
    printed = fresh.run("baseline", config=("model=one",))
    results = fresh.result("", model="one")
    assert "pretrain" not in printed and not (results / "pretrain").exists()

    counts, record = (read_json(results / name) for name in ("jsonl/summary.json", "finetune/metrics.json"))
    assert record["rows"] == counts["pretrain"]["rows_out"] + counts["finetune"]["rows_out"]
    assert record["samples"] == 3 * 8
    assert record["engine"]["zero_stage"] == 3 and record["steps"] == 3
    assert record["memory_plan"]["host_gib"] == pytest.approx(record["peak_host_rss_gib"], rel=0.5)
    assert (results / "finetune/adapter/adapter_model.safetensors").is_file()
    table = pd.read_csv(results / "report/comparison.csv")
    metrics = table.groupby("group")["metric"].agg(set)
    for group in ("base/own", "base/shuffled", "finetune/own", "finetune/shuffled"):
        assert {"clip_score", "vqa_accuracy", "attribute_accuracy"} <= metrics[group]
    page = (results / "report/report.html").read_text(encoding="utf-8")
    assert "Before training, shuffled images" in page and "<h3>Fine-tuning</h3>" in page
    assert not any(words in page for words in ("Stage 1", "Stage 2"))
    assert fresh.job_counts("baseline", config=("model=one",)) == {}, "nothing is left to do"
    full_tuning = fresh.job_counts("baseline", config=("model=one", "finetune={lora: null}"))
    assert full_tuning["finetune_full"] == 1 and "pretrain" not in full_tuning


def test_missing_model_is_reported_despite_results_of_another(finished):
    file = finished.folder / "config/models/gone.yaml"
    write_yaml(file, {"transformers": "model_zoo/gone/", "clip": "clip"})
    try:
        printed = finished.run("baseline", "--dry-run", ok=False, config=("model=gone",))
    finally:
        file.unlink()
    assert "model gone: there is no model_zoo/gone/config.json; docs/models.md says" in printed
