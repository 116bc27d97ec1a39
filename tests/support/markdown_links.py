"""Links in Markdown pages."""

import re


def build_anchor(title: str) -> str:
    """Return the fragment of the link to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
