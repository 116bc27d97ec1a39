"""Failures of a stage's data: wrong paths, and images that cannot be read."""

from dj2mgm.health.failure_signature import Signature, make_fixed_explanation

DATA_SIGNATURES = (
    Signature(
        "A relative path leads nowhere",
        # not a bare word, which is a program that is not installed
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>(?!/)[^']*[./][^']*)'",
        make_fixed_explanation(
            "'{path}' is a relative path, and this file does not exist below the folder in which the command was "
            "started",
            "start commands in the project's folder. Image paths in a dataset are relative to its image folder "
            "(`images` in config/datasets/<name>.yaml); the rule write_jsonl makes them absolute",
        ),
    ),
    Signature(
        "An image cannot be read",
        r"UnidentifiedImageError: cannot identify image file '?(?P<path>[^'\n]*)'?"
        r"|BadImageError: (?:undecodable|empty|missing): (?P<image>.*)"
        r"|OSError: image file is truncated"
        r"|OSError: (?:broken data stream when reading|unrecognized data stream contents when reading) image file",
        make_fixed_explanation(
            "an image is damaged, incomplete or not an image {path}{image}",
            "replace the file or remove its row from the dataset. Every image is opened once before training; "
            "`jsonl.on_bad_row: drop` omits bad ones and counts them. If the image was valid then, it has changed "
            "since; run again with `--forcerun make_dataset`, which checks all images",
        ),
    ),
    Signature(
        "Access to a gated model",
        r"trying to access a gated repo|GatedRepoError|Cannot access gated repo|Access to model \S+ is restricted",
        make_fixed_explanation(
            "the model or dataset is gated, and this machine has no token of an account that may download it",
            "accept the terms on its page of the hub, run `hf auth login`, then `snakemake fetch --config "
            "model=<model>`; stages themselves download nothing",
        ),
    ),
)
