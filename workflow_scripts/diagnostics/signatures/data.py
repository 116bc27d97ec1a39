"""Files that are not where a path says, and images that cannot be read."""

from diagnostics.signature import Signature, says

SIGNATURES = (
    Signature(
        "A relative path leads nowhere",
        # not a bare word: that is a program which is not installed
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>(?!/)[^']*[./][^']*)'",
        says(
            "'{path}' is a relative path, and there is no such file below the folder that the command was started in",
            "start commands in the project's folder. Image paths in a dataset are relative to its image folder "
            "(`images` in config/datasets/<name>.yaml); the rule write_jsonl makes them absolute",
        ),
    ),
    Signature(
        "An image cannot be read",
        r"UnidentifiedImageError: cannot identify image file '?(?P<path>[^'\n]*)'?"
        r"|BadImage: (?:undecodable|empty|missing): (?P<named>.*)"
        r"|OSError: image file is truncated"
        r"|OSError: (?:broken data stream when reading|unrecognized data stream contents when reading) image file",
        says(
            "an image is damaged, incomplete, or no image {path}{named}",
            "replace the file or take its row out of the dataset. Before training every image is opened once: "
            "`jsonl.on_bad_row: drop` leaves bad ones out and counts them. If it was good then, it changed since: "
            "run the rule again with `--forcerun write_jsonl`",
        ),
    ),
)
