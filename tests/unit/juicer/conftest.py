"""Fixtures of tests of recipes: a project with instructions, and requests that are repeated at once."""

from pathlib import Path

import pytest

from dj2mgm.servers import chat_requests
from instructions import save_instructions


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return save_instructions(tmp_path_factory.mktemp("project"))


@pytest.fixture
def quick_requests(monkeypatch):
    """Shorten the first wait before a request is repeated, and let no test use a key of this machine."""
    monkeypatch.setattr(chat_requests, "FIRST_WAIT_S", 0.002)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
