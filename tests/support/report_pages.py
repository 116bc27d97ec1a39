"""Writer of a report, and readers of its elements and its text."""

import re
import sys
from html.parser import HTMLParser

import compare_experiments


def write_report(monkeypatch, config):
    arguments = ["--config", str(config), "--output-dir", str(config.parent)]
    monkeypatch.setattr(sys, "argv", ["compare_experiments.py", *arguments])
    compare_experiments.main()
    return config.parent / "report.html"


class Elements(HTMLParser):
    """All tags with their attributes, the text, and the open tags; tags must be closed in order."""

    VOID = {"meta", "img", "br", "wbr"}

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]

    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def read_page_text(page) -> str:
    return Elements(page.read_text(encoding="utf-8")).text()
