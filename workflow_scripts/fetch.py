"""Download a model, a dataset and benchmarks from the Hugging Face hub, after showing their licenses and sizes.

    python workflow_scripts/fetch.py --config '{"model": "qwen3-vl-2b", "dataset": "llava-pretrain"}'

Only missing folders are downloaded. If a download is interrupted, the same command downloads the files that are not
complete. Every file is compared with the hub's checksum. HF_TOKEN or `hf auth login` gives access to gated
repositories.
"""

import json
import shlex

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():
    from dj2mgm.dataset_resolution.hub_data import HubData, find_hub_benchmark, find_hub_dataset
    from dj2mgm.errors import InputError
    from dj2mgm.fetching.benchmark_files import WRITERS
    from dj2mgm.fetching.known_data import convert_data, look_up_data, needs_download
    from dj2mgm.fetching.repositories import (
        build_model_source,
        check_room,
        convert,
        download,
        find_dataset_source,
        look_up,
    )
    from dj2mgm.model_files.missing_models import describe_missing, find_downloads, find_missing_models
    from dj2mgm.runs.experiments import REFERENCE
    from dj2mgm.runs.layers import merge_experiment, merge_shared_settings
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
    repositories = [look_up(source) for source in sources]
    data_downloads = [look_up_data(data, fetch.rows) for data in missing_data]
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
