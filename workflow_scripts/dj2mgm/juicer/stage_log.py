"""The log of a stage that runs Data-Juicer."""

import sys

import datasets
from loguru import logger

from dj2mgm.cli.messages import WARNING


def configure_log() -> None:
    """Configure loguru, which Data-Juicer uses too: show warnings and one line per operator.

    Progress bars are shown in a terminal only.
    """
    logger.remove()
    levels = {"": "INFO", "data_juicer": "WARNING"}
    logger.add(sys.stderr, format=_choose_line_format, filter=levels)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def _choose_line_format(record: dict) -> str:
    """Return the format of a log line; the workflow's own warnings get the mark that shows them in the console too."""
    own_warning = record["level"].name == "WARNING" and not record["name"].startswith("data_juicer")
    return f"{WARNING if own_warning else '{time:HH:mm:ss} {level} '}{{message}}\n{{exception}}"
