"""The catalogue of operators matches the installed Data-Juicer, and kinds reject other values."""

import pytest

from dj2mgm.juicer.patched_data_juicer import OPERATORS
from dj2mgm.recipes.argument_kinds import convert_number, find_problem, parse_argument_size, parse_kinds
from dj2mgm.recipes.catalogue import ARGUMENT_RULES, INSTALLED_FILE, read_allowed_operators, read_refused_operators
from list_operators import format_listing, list_operators, list_unreviewed


def test_installed_operators_equal_the_reviewed_ones():
    listing = list_operators()
    assert list_unreviewed(listing) == []
    # if this fails, run workflow_scripts/tools/list_operators.py and read the changes
    assert format_listing(listing) == INSTALLED_FILE.read_text(encoding="utf-8")


def test_each_installed_operator_is_allowed_or_refused():
    allowed, refused = set(read_allowed_operators()), set(read_refused_operators())
    assert allowed | refused == set(OPERATORS.modules)
    assert not allowed & refused


def test_rules_and_defaults_match_their_operator():
    for operator in read_allowed_operators().values():
        names = {name for rule in ARGUMENT_RULES for group in operator.rules.get(rule, ()) for name in group}
        assert names <= operator.arguments.keys()
        for name, kind in operator.arguments.items():
            if not {"model", "accelerator", "normalization"} & {kind, name} and "captioner" not in kind:
                default = operator.defaults[name]
                unlimited = isinstance(default, int) and default == 2**63 - 1  # means no limit in Data-Juicer
                required = any(name in group for group in operator.rules.get("at_least_one", ()))
                assert unlimited or required or find_problem(kind, default) is None, (operator.name, name, default)


KINDS = {
    "boolean": ((True, False), (1, 0, "true", None, [])),
    "fraction": ((0, 1, 0.5), (-0.1, 1.1, 32, True, "0.5", None, float("nan"), float("inf"), 10**400)),
    "share": ((1, 0.001), (0, 0.0, -1, 1.01)),
    "count": ((0, 3, 3.0, 2**63 - 1), (-1, 1.5, 2**63, True, "3", 1e300, 10**400, 10**5000)),
    "number -1..1": ((-1, 0.5), (-1.1, 2, "x")),
    "number 0..": ((0, 1e9), (-1, 1e300, 10**400)),
    "number": ((-5, 0.0), (float("-inf"), "1e3", None)),
    "integer 1..100": ((1, 100.0), (0, 101, 1.5)),
    "one of any, all": (("any", "all"), ("sometimes", True, None, ["any"])),
    "one of false": ((False,), (True, 0, "false", None)),
    "text": (
        ("", "Describe the image (briefly).", "ein schönes Bild", "[link]"),
        ("lambda: 0", "(Lambda x: x)", "a/b", "a\\b", "{x}", "%s", "a\nb", "<image>", "__import__", "x" * 201, 3),
    ),
    "prompt": (
        ("图片里有什么？", "Décris l’image.", "चित्र में क्या है?", "What is\nwritten: 50 % or 1/2?"),
        ("a <image> b", "bell\a", "x" * 5000),
    ),
    "rewrite": (
        ("What is {a}? = {b} => Is it {b}? != no", "Où est {a} ? = ici => caption = {a}"),
        (
            "What is it?",
            "a = b => lambda s: s",
            "a => b = c",
            "a = b => c",
            "a = b => {c} = d",
            "{a} {b} {c} {d} {e} = f => {a} = g",
            "a => {b.c} = x",
            "a => {0} = x",
            "a => <image> = x",
            "a => b/c = x",
            3,
        ),
    ),
    "literal": (("red boat", "a-b"), ("a.b", "a*", "(a)", "[a]", "a+", "a?", "", "a|b", "^a", "a$", "r'o'", " ")),
    "characters": (("◆●", "//", ".com", "http://", "<"), ("/etc/passwd", "../x", "", "a\nb", "lambda x", "x" * 51)),
    "size": (("64", "20MiB", "1 GB"), ("1.5MiB", "5B", "-1", "x", 20, "1e9", "20 PiB")),
    "statistic": (("image_text_similarity",), ("a.b", "__class__", "A", "a/b", "")),
    "statistic field": (("__dj__stats__.text_len",), ("text", "__dj__stats__.a.b", "__dj__meta__.x", "images")),
    "chat template": (("gemma",), ("../gemma", "nosuch", {"template": "x"}, 3)),
    "list of characters": ((["a", "b"],), ([], "a", [3], [["a"]], ["a"] * 101)),
    "literal or list of literal": (("a", ["a"]), ([], [None], None)),
    "share or null": ((None, 0.5), (0, "null")),
    "model": (("some/folder",), (3, "", " ", "a\nb", ["x"], "{x}")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_accepts_only_its_values(kind):
    right, wrong = KINDS[kind]
    assert {repr(value): find_problem(kind, value) for value in right if find_problem(kind, value)} == {}
    assert [value for value in wrong if find_problem(kind, value) is None] == []
    assert all("must be" in find_problem(kind, value) for value in wrong)


def test_every_kind_can_be_read_and_others_are_errors():
    for operator in read_allowed_operators().values():
        assert all(parse_kinds(kind) for kind in operator.arguments.values())
    with pytest.raises(ValueError, match="no kind 'anything'"):
        parse_kinds("anything")


@pytest.mark.parametrize(
    ("kind", "value", "typed"),
    [("count", 3.0, 3), ("fraction", 1, 1.0), ("share or null", 1, 1.0), ("text", 1, 1), ("number ..0", -3, -3.0)],
)
def test_integers_are_converted_to_the_arguments_type(kind, value, typed):
    assert convert_number(kind, value) == typed and type(convert_number(kind, value)) is type(typed)


def test_sizes_are_compared_like_in_data_juicer():
    from data_juicer.utils.mm_utils import size_to_bytes

    for size in ("64", "20MiB", "3KB", "7 gib", "1TB"):
        assert parse_argument_size(size) == size_to_bytes(size)
