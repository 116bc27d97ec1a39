"""Interface of operators: a misspelled declaration is an error, and imports have no side effects."""

import os
import subprocess
import sys

import pytest
from data_juicer.ops.base_op import Filter, Mapper

from dj2mgm.juicer.operators.declarations import Declarations, ShareFilter, decides_last, get_declarations
from dj2mgm.juicer.patched_data_juicer import OPERATORS
from paths import PROJECT


@pytest.mark.parametrize(
    ("base", "names", "nearest"),
    [
        ((Declarations, Filter), {"report_kye": "x"}, "report_key"),
        ((Declarations, Mapper), {"draw_at_random": False}, "draws_at_random"),
        ((ShareFilter,), {"limits": "min_score"}, "limit"),
        ((ShareFilter,), {"read_score": staticmethod(lambda stats: [])}, "read_scores"),
    ],
)
def test_a_misspelled_declaration_is_an_error(base, names, nearest):
    with pytest.raises(TypeError, match=f"{next(iter(names))}: operators declare nothing of this name.*'{nearest}'"):
        type("Misspelt", base, names)


def test_operators_can_add_private_names():
    interface = type("Interface", (Declarations, Filter), {"colour": "red"}, interface=True)
    assert type("Operator", (interface,), {"colour": "blue", "_own": 1, "report_key": "x"}).report_key == "x"


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
