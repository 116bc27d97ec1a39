"""Download a model and a dataset from the Hugging Face hub, after showing their licenses and sizes.

    python workflow_scripts/fetch.py --config '{"model": "Qwen/Qwen3-VL-2B-Instruct", "dataset": "owner/name"}'

Only missing folders are downloaded. An interrupted download continues with the same command. Every file is compared
with the hub's checksum. HF_TOKEN or `hf auth login` gives access to gated repositories.
"""

import argparse
import json
import shlex

from dj2mgm.command_line import command_line, project_imports

with project_imports():
    from dj2mgm.config.experiments import REFERENCE
    from dj2mgm.config.layers import merge_experiment
    from dj2mgm.config.missing_models import find_downloads, missing_parts
    from dj2mgm.errors import InputError
    from dj2mgm.fetching import check_room, convert, dataset_source, download, look_up, model_source


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=json.loads, default={}, help="keys of the configuration, as JSON")
    args = parser.parse_args()
    config = merge_experiment(REFERENCE, args.config)
    missing = missing_parts(config.model)
    downloads = find_downloads(config.model, missing)
    sources = [model_source(one) for one in downloads]
    if dataset := dataset_source(config.dataset):
        sources.append(dataset)
    if not sources and not missing:
        print(f"nothing to fetch: the model {config.model.name} and the dataset {config.dataset} are on this machine")
        return
    found = [look_up(source) for source in sources]
    for one in found:
        print(one.describe(), flush=True)
    check_room(found)
    for one in found:
        download(one)
    for one in downloads:
        convert(one)
    model = merge_experiment(REFERENCE, args.config).model  # read again: a hub id is now a folder
    if left := missing_parts(model):
        raise InputError(
            f"model {model.name}: no file names the source of {', '.join(left.values())}; docs/models.md says "
            "where models come from"
        )
    given = [shlex.quote(f"{key}={args.config[key]}") for key in ("model", "dataset") if key in args.config]
    print(f"next: {' '.join(['snakemake --cores 16', REFERENCE, *(['--config', *given] if given else [])])}")


if __name__ == "__main__":
    main()
