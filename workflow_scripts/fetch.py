"""Download a model, a dataset and benchmarks from the Hugging Face hub, after showing their licenses and sizes.

    python workflow_scripts/fetch.py --config '{"model": "qwen3-vl-2b", "dataset": "llava-pretrain"}'

Only missing folders are downloaded. If a download is interrupted, the same command downloads the files that are not
complete. Every file is compared with the hub's checksum. HF_TOKEN or `hf auth login` gives access to gated
repositories.
"""

import json
import shlex
from collections.abc import Iterable

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():
    from huggingface_hub.constants import HF_HUB_CACHE

    from dj2mgm.dataset_resolution.hub_data import HubData, find_hub_benchmark, find_hub_dataset
    from dj2mgm.errors import InputError
    from dj2mgm.fetching.benchmark_files import WRITERS
    from dj2mgm.fetching.known_data import convert_data, look_up_data, needs_download
    from dj2mgm.fetching.repositories import (
        HubSource,
        build_model_source,
        check_room,
        convert,
        download,
        find_dataset_source,
        look_up,
    )
    from dj2mgm.model_files.missing_models import ModelDownload, describe_missing, find_downloads, find_missing_models
    from dj2mgm.runs.experiments import REFERENCE
    from dj2mgm.runs.layers import merge_experiment, merge_shared_settings
    from dj2mgm.servers.hub import UnreachableHubError
    from dj2mgm.storage.files import format_yaml_line


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=json.loads, default={}, help="keys of the configuration, as JSON")
    args = parser.parse_args()
    config, fetch = merge_experiment(REFERENCE, args.config), merge_shared_settings(args.config).fetch
    benchmarks = [find_hub_benchmark(name) for name in fetch.benchmarks]
    hub_data = list(filter(None, [*benchmarks, find_hub_dataset(config.dataset)]))
    missing_data = [data for data in hub_data if needs_download(data, fetch.rows)]
    missing_models = find_missing_models(config.model)
    model_downloads = find_downloads(config.model, missing_models)
    sources = [build_model_source(model_download) for model_download in model_downloads]
    if dataset := find_dataset_source(config.dataset):
        sources.append(dataset)
    if not sources and not missing_models and not missing_data:
        print(f"nothing to fetch: the model {config.model.name} and the dataset {config.dataset} are on this machine")
        name_files(benchmarks)
        return
    try:
        repositories = [look_up(source) for source in sources]
        data_downloads = [look_up_data(data, fetch.rows) for data in missing_data]
    except UnreachableHubError as error:
        print(describe_offline_steps(model_downloads, dataset, missing_data), flush=True)
        raise InputError(f"{error}; the lines above say what to do without internet") from None
    for item in (*repositories, *data_downloads):
        print(item.describe(), flush=True)
    check_room([*repositories, *(data.repository for data in data_downloads)])
    for repository in repositories:
        download(repository)
    for data in data_downloads:
        convert_data(data, download(data.repository))
    for model_download in model_downloads:
        convert(model_download)
    model = merge_experiment(REFERENCE, args.config).model  # read again: a hub id is now a folder
    if unavailable := find_missing_models(model):
        problems = dict.fromkeys(describe_missing(key, part) for key, part in unavailable.items())
        raise InputError(
            f"model {model.name}: {' and '.join(problems)}, and no known download provides it; docs/models.md says "
            "where models come from"
        )
    name_files(benchmarks)
    overrides = [shlex.quote(f"{key}={args.config[key]}") for key in ("model", "dataset") if key in args.config]
    print(f"next: {' '.join(['snakemake --cores 16', REFERENCE, *(['--config', *overrides] if overrides else [])])}")


def describe_offline_steps(
    models: Iterable[ModelDownload], dataset: HubSource | None, missing_data: Iterable[HubData]
) -> str:
    """Return what to do on a machine that does not reach the hub, and every folder to copy to it."""
    commands, folders = [], []
    for model in models:
        commands += model.iterate_commands()
        cache = f"{HF_HUB_CACHE}/models--{model.hub_id.replace('/', '--')}"
        folders.append(model.converted or model.folder or cache)
    if dataset:
        commands.append(f"hf download {dataset.hub_id} --repo-type dataset")
        folders.append(f"{HF_HUB_CACHE}/datasets--{dataset.hub_id.replace('/', '--')}")
    data = [str(item.folder) for item in missing_data]
    if data:
        commands.append("this `snakemake fetch`, which also converts the data")
    lines = [
        "The hub does not answer. Behind a proxy, set HTTPS_PROXY; with a mirror of the hub, set HF_ENDPOINT.",
        "Without internet, run on a machine that has it, in a copy of this project:",
        *(f"  {command}" for command in commands),
        "and copy to the same paths here:",
        *(f"  {folder}" for folder in dict.fromkeys((*folders, *data))),
        "  .venv, with the Python that it was made with (or, with --sdm conda, .snakemake/conda)",
    ]
    return "\n".join(lines)


def name_files(benchmarks: list[HubData]) -> None:
    """Print the configuration that names the files of benchmarks."""
    if benchmarks:
        files = {
            data.name: {key: str(data.folder / name) for key, name in WRITERS[data.name].files.items()}
            for data in benchmarks
        }
        print(f"benchmarks: add {shlex.quote(f'benchmarks={format_yaml_line(files)}')} to --config")


if __name__ == "__main__":
    main()
