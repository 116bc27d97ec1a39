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

    from dj2mgm.dataset_resolution.experiment_dataset import (
        DOWNLOADS_FOLDER,
        HubData,
        find_hub_dataset,
    )
    from dj2mgm.errors import InputError
    from dj2mgm.features.fetch.known_data import (
        WRITERS,
        convert_data,
        find_hub_benchmark,
        list_fetched_files,
        list_patterns,
        look_up_data,
        needs_download,
    )
    from dj2mgm.features.fetch.repositories import (
        RESUME_REMEDY,
        HubSource,
        build_dataset_source,
        build_model_source,
        check_room,
        convert,
        download,
        look_up,
    )
    from dj2mgm.model_files.missing_models import (
        ModelDownload,
        describe_missing,
        find_downloads,
        find_facts,
        find_missing_models,
    )
    from dj2mgm.model_files.model_folders import MODEL_SUFFIXES
    from dj2mgm.runs.experiments import REFERENCE
    from dj2mgm.runs.layers import merge_experiment, merge_shared_settings
    from dj2mgm.servers.hub import Request, UnreachableHubError, check_hub_answers
    from dj2mgm.settings.dataset_files import HubArchive, HubBenchmark
    from dj2mgm.settings.models import ModelFile
    from dj2mgm.storage.files import format_yaml_line

CACHE_FOLDERS = ("blobs", "refs", "snapshots")  # folders of a repository in the hub's cache


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
    if dataset := build_dataset_source(config.dataset):
        sources.append(dataset)
    if not sources and not missing_models and not missing_data:
        print(f"nothing to fetch: the model {config.model.name} and the dataset {config.dataset} are on this machine")
        name_files(benchmarks)
        return
    try:
        check_hub_answers(Request("the hub", "reached", RESUME_REMEDY, {}))
        repositories = [look_up(source) for source in sources]
        data_downloads = [look_up_data(data, fetch.rows) for data in missing_data]
    except UnreachableHubError as error:
        keys = {key: args.config[key] for key in ("dataset", "fetch") if key in args.config}
        overrides = [f"{key}={value if key == 'dataset' else format_yaml_line(value)}" for key, value in keys.items()]
        print(describe_offline_steps(config.model, model_downloads, dataset, missing_data, overrides), flush=True)
        raise InputError(f"{error}. The lines above say what to do without internet") from None
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
    print(f"next: {' '.join(['snakemake', REFERENCE, *(['--config', *overrides] if overrides else [])])}")


def describe_offline_steps(
    model: ModelFile,
    downloads: Iterable[ModelDownload],
    dataset: HubSource | None,
    missing_data: Iterable[HubData],
    overrides: list[str],
) -> str:
    """Return what to do on a machine that does not reach the hub, and the files to copy to it.

    Args:
        overrides: keys of `--config` that name known datasets and benchmarks.
    """
    commands, files = [], []
    for download in downloads:
        first, *others = download.iterate_commands()
        facts = find_facts(model, download.hub_id)
        commands += [f"{first}   # {facts}" if facts else first, *others]
        folder = download.converted or download.folder
        names = [f"*{suffix}" for suffix in MODEL_SUFFIXES] if folder else CACHE_FOLDERS
        files.append((folder or _find_cache_folder("model", download.hub_id), names))
    if dataset:
        commands.append(f"hf download {dataset.hub_id} --repo-type dataset")
        files.append((_find_cache_folder("dataset", dataset.hub_id), CACHE_FOLDERS))
    missing_data = list(missing_data)
    if missing_data:
        licenses = ", ".join(f"{data.name} (license {data.file.license})" for data in missing_data)
        commands.append(f"{shlex.join(['snakemake', 'fetch', '--config', *overrides])}   # also converts {licenses}")
        files += [(data.folder, list_fetched_files(data)) for data in missing_data]
    commands += [line for data in missing_data if (line := _find_plain_download(data))]
    lines = [
        "Behind a proxy, set HTTPS_PROXY; with a mirror of the hub, set HF_ENDPOINT.",
        "Without internet, run on a machine that has it, in a copy of this project:",
        *(f"  {command}" for command in commands),
        "and copy these files to the same paths here (as `rsync --archive` does, with links):",
        *(f"  {folder}/{{{','.join(names)}}}" for folder, names in dict(files).items()),
        "  .venv, with the Python that it was made with (or, with --sdm conda, .snakemake/conda)",
    ]
    return "\n".join(lines)


def _find_cache_folder(kind: str, hub_id: str) -> str:
    return f"{HF_HUB_CACHE}/{kind}s--{hub_id.replace('/', '--')}"


def _find_plain_download(data: HubData) -> str | None:
    """Return the command that downloads a known dataset with all rows, which is read without a conversion."""
    if isinstance(data.file, HubBenchmark):
        return None
    folder = DOWNLOADS_FOLDER / f"{data.name.partition('/')[0]}-whole"
    includes = [word for pattern in list_patterns(data) for word in ("--include", pattern)]
    words = ["hf", "download", data.file.hub_id, "--repo-type", "dataset", *includes, "--local-dir", str(folder)]
    command = shlex.join(words)
    if isinstance(data.file, HubArchive):
        command += f" && unzip -q -n {folder / data.file.images} -d {folder}"
    return f"{command}   # instead, all rows: dataset={folder / data.subset}"


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
