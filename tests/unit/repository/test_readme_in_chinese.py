"""README.md and README.zh-CN.md must agree in all parts that are not translated."""

import shlex
from collections import Counter

from markdown_it import MarkdownIt
from markdown_it.token import Token

from paths import PROJECT

ENGLISH = (PROJECT / "README.md").read_text(encoding="utf-8")
CHINESE = (PROJECT / "README.zh-CN.md").read_text(encoding="utf-8")


def code(fence: Token) -> list:
    """Return a block's lines, with shell lines as words without their translated comments."""
    lines = fence.content.splitlines()
    return [shlex.split(line, comments=True) for line in lines] if fence.info == "bash" else lines


def inline_code(parts: list[Token]) -> list[str]:
    return [part.content for part in parts if part.type == "code_inline"]


def links(text: str) -> list[str]:
    tokens = MarkdownIt("commonmark").parse(text)
    return [part.attrs["href"] for token in tokens for part in token.children or [] if part.type == "link_open"]


def untranslated(text: str) -> dict:
    """Return the parts that both languages share; the first link, to the other language, is left out."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    first_cells = [tokens[row + 2] for row, token in enumerate(tokens) if token.type == "tr_open"]
    return {
        "headings": [token.tag for token in tokens if token.type == "heading_open"],
        "code blocks": [(token.info, code(token)) for token in tokens if token.type == "fence"],
        "first columns": [inline_code(cell.children) for cell in first_cells],
        # counts, because the languages differ in word order
        "inline code": Counter(name for token in tokens for name in inline_code(token.children or [])),
        "links": links(text)[1:],
    }


def test_both_are_equal_except_for_the_language():
    assert untranslated(CHINESE) == untranslated(ENGLISH) and all(untranslated(ENGLISH).values())
    assert (links(ENGLISH)[0], links(CHINESE)[0]) == ("README.zh-CN.md", "README.md")
