"""Names and paths that Snakemake can carry: names become folders of results/ and parts of its own command lines."""

from errors import InputError

BRACES = "{}"  # in a file name, Snakemake reads {word} as a wildcard
# Snakemake hands names to jobs on a cluster between quotes, and several of them separated by commas
NOT_IN_NAMES = BRACES + "'\"\\,/"


def check_name(kind: str, name: str) -> None:
    """
    Args:
        kind: what the name is of: experiment, dataset or model.

    Raises:
        InputError: the name cannot be a folder of results/, or cannot be handed to a job.
    """
    unusable = [character for character in name if character in NOT_IN_NAMES or not character.isprintable()]
    if unusable:
        raise InputError(f"{kind} {name!r}: a name cannot have {unusable[0]!r} in it; rename its file or folder")
    if not name.strip() or name in (".", ".."):
        raise InputError(f"{kind} {name!r}: this is no name for a folder; rename its file or folder")


def check_path(path: str) -> str:
    """The path, of a file that a rule takes as input.

    Raises:
        InputError: Snakemake would read a part of it as a wildcard.
    """
    if any(character in BRACES for character in path):
        raise InputError(f"{path}: Snakemake reads braces in a path as a wildcard; rename the file or folder")
    return path
