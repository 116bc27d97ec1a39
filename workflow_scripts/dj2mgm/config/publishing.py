"""What is published of a run, and from which files of its record; refused before anything runs where it cannot be."""

from dj2mgm.config.licenses import check_licenses
from dj2mgm.config.pages import page_of
from dj2mgm.config.reading import names_folder
from dj2mgm.config.recipes import read_recipes
from dj2mgm.config.runs import Run, Runs
from dj2mgm.config.stages import is_mgm
from dj2mgm.errors import InputError


def publish_settings(runs: Runs, run: Run) -> dict:
    """What model, dataset and cards are made of. Where they are pushed is no part of it: that makes neither again.

    Raises:
        InputError: a license is not stated, or there is no adapter that others could load.
    """
    model, weights = run.config["model"], runs.publish["weights"]
    check_licenses(run.dataset)
    file = f"config/models/{model['name']}.yaml"
    if not model.get("license"):
        raise InputError(
            f"publish: nothing is published without a license, and {model['name']} has none; state license in {file}, "
            "as its base models and data allow, which trains nothing again"
        )
    bases = model.get("hub_ids", [])
    if not bases and "transformers" in model and not names_folder(model["transformers"]):
        bases = [model["transformers"]]
    if weights == "adapter" and not run.config["finetune"]["lora"]:
        raise InputError(f"publish.weights: {run.experiment} trains no adapter but the language model; choose merged")
    adapter_base = bases[0] if bases and "assembled" not in model else None  # of an MGM, its language model
    if weights == "adapter" and not adapter_base:
        raise InputError(
            f"publish.weights: nobody can load an adapter without its base model, and {file} names none that stock "
            "libraries load from the hub; state hub_ids there, or choose merged"
        )
    evaluate = run.config["evaluate"]
    return {
        "experiment": run.experiment,
        "seed": run.seed,
        "dataset": run.dataset["name"],
        "licenses": run.dataset["licenses"],
        "model": model["name"],
        "license": model["license"],
        "base_models": bases,
        "adapter_base": adapter_base,
        "mgm": is_mgm(model),
        "made_here": "tiny" in model or "foundation" in model,  # of parts that this workflow has trained itself
        "weights": weights,
        "question": evaluate["caption_question"],
        "max_new_tokens": evaluate["max_new_tokens"],
        "recipes": read_recipes(run.config),
        "records": records_of(runs, run),
    }


def records_of(runs: Runs, run: Run) -> dict[str, str]:
    """The files whose figures the cards state, by their names beside the cards."""
    records = {
        "dataset/summary.json": f"results/datasets/{run.dataset['name']}/summary.json",
        "comparison.csv": f"results/{page_of(runs, run.experiment)}/comparison.csv",
    }
    for stage in ("filter", "synthesize", "jsonl", *run.trains):
        names = ("metrics.json", "config.yaml") if stage in run.trains else ("summary.json",)
        if stage in run.settings:
            records |= {f"{stage}/{name}": f"{runs.stage(run, stage)}/{name}" for name in names}
    return records
