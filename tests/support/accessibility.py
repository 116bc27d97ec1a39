"""Accessibility of a page by axe-core: contrast, labels, roles and elements that the keyboard cannot reach."""

from pathlib import Path

import pytest

from browser import Page

AXE = Path(__file__).parent / "axe/axe.min.js"
SERIOUS = """axe.run(document).then(found => found.violations
    .filter(rule => ["serious", "critical"].includes(rule.impact))
    .map(rule => `${rule.id}: ${rule.nodes.map(node => node.target.join(" ")).join(", ")}`))"""
SIZES = [(1280, 900), (390, 844)]  # CSS pixels of a laptop and a phone
VIEWS = [  # with whether the page is dark
    (SIZES[0], False),
    (SIZES[1], True),
    pytest.param(SIZES[0], True, marks=pytest.mark.slow),
    pytest.param(SIZES[1], False, marks=pytest.mark.slow),
]


def find_serious(page: Page) -> list[str]:
    """Return the serious and critical findings of the page in its present state."""
    page.evaluate(f"{AXE.read_text(encoding='utf-8')};0")
    return page.evaluate(SERIOUS)
