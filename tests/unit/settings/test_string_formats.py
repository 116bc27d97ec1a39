"""Names reach a job unchanged, also on a cluster, and API keys in a server's answers are found in every encoding."""

import base64
import html
import json
import os
import shlex
import string
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from snakemake.io import PeriodicityDetector
from snakemake.target_jobs import parse_target_jobs_cli_args
from snakemake_interface_executor_plugins.utils import TargetSpec, encode_target_jobs_cli_args, format_cli_arg

from dj2mgm.cli.command_line import escape_control
from dj2mgm.errors import InputError
from dj2mgm.settings.string_formats import check_format, check_paths, compile_secret_pattern, has_format, make_name


# half of all strings are not valid names
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.text(st.characters(codec="utf-8") | st.sampled_from(string.punctuation + " \n"), min_size=1, max_size=8))
def test_an_accepted_name_reaches_a_cluster_job_unchanged(name):
    assume(has_format("folder", name))
    spec = TargetSpec("make_dataset", {"dataset": name})
    flag, *arguments = shlex.split(format_cli_arg("--target-jobs", encode_target_jobs_cli_args([spec])))
    assert flag == "--target-jobs" and parse_target_jobs_cli_args(arguments) == [spec]


def test_names_of_folders_and_of_files_in_config():
    impossible = ("a/b", "it's", 'a"b', "a,b", "a\\b", "a{x}", "a\nb", "a\xa0b", "", " ", "..")
    folders = ("a+b", "x|y", "Bilder ü", "山", "-a", "$(touch X)", "a;b", "[1]*")
    names = ("baseline", "a.b", "a-b_1", "007", "_x")
    assert not [name for name in impossible if has_format("folder", name) or has_format("name", name)]
    assert [name for name in (*folders, *names) if not has_format("folder", name)] == []
    assert [name for name in names if not has_format("name", name)] == []
    assert [name for name in (*folders, ".a", "a.", "a b", "a" * 101) if has_format("name", name)] == []


def test_a_path_with_braces_is_named():
    check_format("x", "path", "it's/a,b \\.jsonl")
    with pytest.raises(InputError, match="^a/{b}.jsonl must .*rename"):
        check_format("a/{b}.jsonl", "path", "a/{b}.jsonl")


@pytest.mark.parametrize("name", ["a" * 40, "x" + "ü" * 40, "ab" * 20])
def test_a_name_that_snakemake_takes_for_a_recursion_is_refused(name):
    assert PeriodicityDetector().is_periodic(name) and not has_format("folder", name) and not has_format("name", name)
    assert has_format("folder", f"{name}-1")


def test_impossible_paths_are_refused_together():
    with pytest.raises(InputError, match=r"^a\{1, a\{2, a\{3, … \(7 in all\), each must be a path without braces"):
        check_paths(["fine.png", *(f"a{{{number}" for number in range(1, 8))])


@pytest.mark.parametrize("path", [os.fsdecode(b"bad\xff.png"), "a\tb.png", "a\x7f.png"])
def test_an_unprintable_path_is_escaped_in_the_message(path):
    with pytest.raises(InputError, match="must be a path without braces, tabs") as error:
        check_format(path, "path", path)
    assert escape_control(str(error.value)).isprintable()


@pytest.mark.parametrize(
    ("text", "name"),
    [("my photos", "my_photos"), ("Ürlaub à Köln", "Urlaub_a_Koln"), ("照片", "my_data"), ("../x", "x")],
)
def test_names_are_made_of_any_text(text, name):
    assert make_name(text) == name and has_format("name", name)


KEY = 'sk-Ab12/+xyz~?>"key'
SPELLINGS = {
    "as it is": KEY,
    "capitals": KEY.upper(),
    "small letters": KEY.lower(),
    "json": json.dumps(KEY),
    "html": html.escape(KEY),
    "percent": quote(KEY, safe=""),
    "hexadecimal": KEY.encode().hex(),
    "base64 for addresses": base64.urlsafe_b64encode(KEY.encode()).decode(),
    **{f"base64 after {n}": base64.b64encode(b"u" * n + KEY.encode() + b":tail").decode() for n in range(4)},
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_key_is_found_in_every_spelling(spelling):
    redacted = compile_secret_pattern(KEY).sub("<key>", f"before {spelling} after")
    assert "<key>" in redacted and redacted.startswith("before ") and redacted.endswith(" after")
    assert len(redacted) <= len("before <key> after") + 12  # characters that base64 combines with their neighbors


def test_a_placeholder_is_not_found_in_other_words():
    assert compile_secret_pattern("EMPTY").sub("<key>", "EMPTY, an empty RU1QVFk=") == "<key>, an empty RU1QVFk="
