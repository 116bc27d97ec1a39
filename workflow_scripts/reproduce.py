"""Reproduce the run of a crate in a folder of its own, and show the difference of every score.

    python workflow_scripts/reproduce.py --crate results/shapes/tiny/report/crate/run.crate.zip --cores 1

Differences between this machine and the crate's machine are printed first. This clone's code runs with the crate's
configuration; nothing of the crate is executed. Results are in results/reproduced/<digest of the crate>/. After a kill,
the same command continues.
"""

import os
import subprocess
import sys
from pathlib import Path

from dj2mgm.cli.command_line import command_line, escape_control, make_parser
from dj2mgm.errors import InputError
from dj2mgm.provenance.allowed_folders import AllowedFolders
from dj2mgm.provenance.crate_files import ROOT, SNAKEFILE, digest_images
from dj2mgm.provenance.crate_reader import Crate, open_crate
from dj2mgm.provenance.differences import (
    check_inputs,
    check_recorded,
    compare_scores,
    describe_differences,
    format_comparisons,
    parse_comparison,
    write_comparisons,
)
from dj2mgm.provenance.reproduction_folder import COMMAND_LINE, write_reproduction_folder, writing_to
from dj2mgm.records.crate_records import CrateImages

RESULTS = Path("results/reproduced")
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--crate", type=Path, required=True, help="zip file or folder")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--python", default=sys.executable, help="Python interpreter with Snakemake")
    parser.add_argument("--deployment", nargs="*", default=[], help="values of Snakemake's --sdm, such as conda")
    parser.add_argument(
        "--folders", nargs="*", type=Path, default=[], help="folders that it may read, in addition to this one"
    )
    args = parser.parse_args()
    snakemake = [args.python, "-P", "-m", "snakemake", "--cores", str(args.cores)]
    if args.deployment:
        snakemake += ["--sdm", *args.deployment, f"--conda-prefix={Path('.snakemake/conda').absolute()}"]
    check_is_elsewhere(args.crate)
    try:
        with open_crate(args.crate) as crate:
            reproduce(crate, snakemake, AllowedFolders(Path.cwd(), args.folders))
    except KeyboardInterrupt:
        raise InputError("interrupted; the same command continues") from None


def check_is_elsewhere(crate: Path) -> None:
    """Raise InputError if results would be written into the crate itself, which would change it."""
    if Path.cwd().is_relative_to(os.path.realpath(crate)):
        raise InputError(
            f"crate: the current folder is inside of the crate {crate}, and results would change it; start this in "
            "another folder"
        )


def reproduce(crate: Crate, snakemake: list[str], allowed_folders: AllowedFolders) -> None:
    """Run the crate's jobs again in a folder of its own, and print the difference of every score."""
    table = f"results/{crate.record.page}/comparison.csv"
    crate_scores = parse_comparison(crate.read(table), f"crate: {crate.path}: {table}")
    differences = [f"differs: {sentence}" for sentence in describe_differences(crate)]
    for sentence in differences or ["no difference: code, packages and machine are those of the crate"]:
        print(escape_control(sentence), flush=True)
    check_inputs(crate.record.inputs, allowed_folders)
    folder = (RESULTS / crate.identity[:12]).absolute()
    try:
        runs = write_reproduction_folder(crate, folder, allowed_folders)
    except InputError as error:
        commit = crate.record.commit.removesuffix("-dirty")
        remedy = f" (git checkout {commit} restores the crate's code)" if commit else ""
        raise InputError(f"the crate cannot be reproduced here: {error}{remedy}") from None
    print(f"running in {folder}", flush=True)
    snakemake += [f"--snakefile={ROOT / SNAKEFILE}", f"--configfile={folder / COMMAND_LINE}", "--"]
    datasets = runs.datasets
    check_recorded(crate.record, datasets, allowed_folders)
    for images in crate.record.images:
        name = images.dataset
        if name in datasets:
            run_targets(snakemake, folder, f"results/datasets/{name}/summary.json")
            check_images(images, folder, datasets[name].images)
    run_targets(snakemake, folder, table)
    comparisons = compare_scores(crate_scores, parse_comparison((folder / table).read_bytes(), str(folder / table)))
    with writing_to(folder):
        write_comparisons(comparisons, folder / "reproduction.csv")
    print("\n".join(map(escape_control, format_comparisons(comparisons).splitlines())))
    print(f"wrote {folder / 'reproduction.csv'}", flush=True)


def run_targets(snakemake: list[str], folder: Path, target: str) -> None:
    process = subprocess.run([*snakemake, target], cwd=folder, env=os.environ | OFFLINE)
    if process.returncode:
        raise InputError(f"the run in {folder} failed; see above, and run the same command again")


def check_images(images: CrateImages, folder: Path, roots: dict[str, str]) -> None:
    """Compare a dataset's images with the images of the crate's run."""
    name = images.dataset
    image_roots = {split: str(folder / root) for split, root in roots.items()}
    local_images = digest_images(folder / "results/datasets" / name, image_roots)
    if local_images == images.model_dump(include=set(local_images)):
        print(escape_control(f"the {local_images['count']} images of {name} are those of the crate"), flush=True)
    elif images.drawn:
        print(
            escape_control(f"differs: this code or its packages draw the images of {name} differently"),
            flush=True,
        )
    else:
        raise InputError(
            f"the images of the dataset {name} differ from those of the crate's run ({local_images['count']} here, "
            f"{images.count} there); replace them by those images"
        )


if __name__ == "__main__":
    main()
