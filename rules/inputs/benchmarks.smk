# Input functions of rules/benchmarks.smk.
from dj2mgm.cli.console import UserError


def benchmark_files(wildcards):
    """Input function: the user's own files of a benchmark, without the folder of its images."""
    settings = RUNS.by_folder(wildcards.run).settings.get(
        f"benchmarks/{wildcards.benchmark}"
    )
    if settings is None:
        raise UserError(
            f"benchmarks.{wildcards.benchmark} is not set: name its files in config/config.yaml"
        )
    files = settings.files
    return check_user_files(file for kind, file in files.items() if kind != "images")


def benchmark_images(wildcards):
    """Params function: a digest of the images that a benchmark's files name."""
    settings = RUNS.by_folder(wildcards.run).settings.get(
        f"benchmarks/{wildcards.benchmark}"
    )
    files = settings.files if settings else {}
    folder = files.get("images")
    return FINGERPRINTS.hash_images(
        (file, folder) for kind, file in files.items() if folder and kind != "images"
    )


def list_benchmark_outputs(benchmark, name):
    """Return a file of a benchmark, for every run in the challenge's table; a model before training submits nothing."""
    return sorted(
        {
            f"{run['benchmarks'][benchmark]}/{name}"
            for run in build_challenge_settings()["runs"]
            if run["seed"] is not None or name != "submission.xlsx"
        }
    )


def list_challenge_files(names, file):
    """Return a file of each of these benchmarks that the challenge scores, for every run in its table."""
    benchmarks = [
        name for name in build_challenge_settings()["scores"] if name in names
    ]
    return [path for name in benchmarks for path in list_benchmark_outputs(name, file)]
