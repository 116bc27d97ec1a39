"""Interface of operators (declared arguments, imports without side effects), and operators without a model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from dj2mgm.juicer.chain import show_text
from dj2mgm.juicer.operators.declarations import Declarations, ShareFilter, argument, decides_last, get_declarations
from dj2mgm.juicer.operators.image_file_operators import classify_image_integrity, compute_image_text_hash
from dj2mgm.juicer.patched_data_juicer import OPERATORS, list_valid_arguments
from paths import PROJECT


def test_operators_that_do_not_read_captions_get_texts_without_tokens():
    """All other operators of this workflow get whole texts, also if their module does not name the tokens."""
    own = {name: kind for name, kind in OPERATORS.modules.items() if kind.__module__.startswith("dj2mgm.")}
    text = "<__dj__image>\na <|__dj__eoc|>"
    assert {name for name, kind in own.items() if show_text(object.__new__(kind), text) != text} == {
        "image_embedding_deduplicator",
        "image_integrity_filter",
        "image_near_deduplicator",
        "image_text_deduplicator",
        "openai_captioning_mapper",
    }


class LongestFilter(ShareFilter):
    limit = "max_words"
    max_words: int = argument(..., "most words")
    batch_size: int = argument(7, "rows at once")
    keep_fraction: float | None = argument(None, "share of the rows")

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        return stats["words"]


def test_declared_arguments_are_attributes_that_data_juicer_knows():
    assert set(list_valid_arguments(LongestFilter)) > {"max_words", "batch_size", "keep_fraction", "reversed_range"}
    operator = LongestFilter(max_words=3, reversed_range=True)
    assert (operator.max_words, operator.keep_fraction, operator.batch_size) == (3, None, 7)
    assert operator.reversed_range and operator.shares == {}
    assert LongestFilter(max_words=3, batch_size=9, keep_fraction=0.5).shares == {"keep_fraction": "max_words"}
    with pytest.raises(TypeError, match="LongestFilter needs the arguments max_words"):
        LongestFilter()


def test_operators_of_data_juicer_have_the_defaults():
    operator = OPERATORS.modules["text_length_filter"](min_len=1)
    assert not isinstance(operator, Declarations) and get_declarations(operator).report_key is None
    assert get_declarations(operator).finish_report({"a": 1}) == {"a": 1} and not decides_last(operator)
    assert decides_last(OPERATORS.modules["document_deduplicator"]())


def test_imports_have_no_side_effects_and_recipes_check_it():
    code = (
        "from data_juicer.utils.lazy_loader import LazyLoader\n"
        "before = LazyLoader._install_package.__func__\n"
        "from pathlib import Path\n"
        "from dj2mgm.recipes.recipe_parsing import parse_steps\n"
        "from dj2mgm.juicer.engine import build_operators\n"
        "assert LazyLoader._install_package.__func__ is before\n"
        "build_operators(parse_steps('recipe', [{'text_length_filter': None}]), Path())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "workflow_scripts")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "call patch_data_juicer() in the entry point" in done.stderr


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "photo.png"
    path.parent.mkdir()
    Image.effect_noise((32, 32), 50).convert("RGB").save(path)
    return path


def test_each_kind_of_broken_image_has_its_reason(photo, tmp_path):
    root = photo.parent
    (root / "empty.png").touch()
    (root / "half.png").write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    (tmp_path / "elsewhere.png").write_bytes(photo.read_bytes())
    reasons = {"photo.png": "ok", "gone.png": "missing", "empty.png": "empty", "half.png": "undecodable"}
    for name, reason in (reasons | {"../elsewhere.png": "outside", "/etc/hostname": "outside"}).items():
        assert classify_image_integrity([os.path.join(root, name)], str(root)) == reason


def test_the_hash_depends_on_pixels_and_text(photo):
    copy, other = photo.with_name("copy.png"), photo.with_name("other.png")
    copy.write_bytes(photo.read_bytes())
    other.write_bytes(photo.read_bytes() + b"\0")  # same pixels, other bytes
    reference = compute_image_text_hash([str(photo)], "a cat")
    assert compute_image_text_hash([str(copy)], "a cat") == reference
    assert compute_image_text_hash([str(photo)], "a cat ") != reference
    assert compute_image_text_hash([str(other)], "a cat") != reference
