"""Files for the Snakemake catalog, GitHub and `snakemake --report` name existing objects."""

import os
import re
import tomllib
import zipfile

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from dj2mgm.runs.layers import EMBEDDED_DEFAULTS
from forked_snakemake import run_snakemake
from paths import PROJECT

RULES = sorted((PROJECT / "rules").rglob("*.smk"))
CI = yaml.safe_load((PROJECT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
MAKE_TARGETS = re.findall(r"^(\w[\w-]*):", (PROJECT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def read(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def test_the_catalog_states_the_deployments_of_rules():
    usage = yaml.safe_load(read(".snakemake-workflow-catalog.yml"))["usage"]
    deployment = usage["software-stack-deployment"]
    rules = "".join(path.read_text(encoding="utf-8") for path in RULES)
    assert deployment["conda"] == ("conda:" in rules) and deployment["apptainer"] == ("container:" in rules)
    assert deployment["report"] == ("report(" in rules) and not usage["mandatory-flags"]["flags"]


def test_the_configurations_page_explains_each_key_and_folder():
    page = read("config/README.md")
    keys = set(re.findall(r"`(\w+)`", page.split("## Keys")[1].split("## Folders")[0]))
    folders = set(re.findall(r"^\| `(\w+)/`", page, flags=re.MULTILINE))
    assert set(yaml.safe_load(read("config/config.yaml"))) <= keys
    assert folders == {path.name for path in (PROJECT / "config").iterdir() if path.is_dir()}


def test_each_page_in_a_report_has_an_existing_caption():
    captions = set()
    for path in RULES:
        for page in re.findall(r"report\((.*?)\n        \),", path.read_text(encoding="utf-8"), flags=re.DOTALL):
            [caption] = re.findall(r'caption="(.+)"', page)
            assert (path.parent / caption).is_file() and "category=" in page and "labels=" in page, page
            captions.add((path.parent / caption).resolve())
    files = {*(PROJECT / "report").iterdir(), *(PROJECT / "workflow_scripts").rglob("*.rst")}
    assert captions | {PROJECT / "report/workflow.rst"} == files


def test_ci_uses_commands_of_the_makefile_and_readme():
    commands = [step["run"] for job in CI["jobs"].values() for step in job["steps"] if "make " in step.get("run", "")]
    targets = {re.search(r"\bmake ([\w-]+)$", command)[1] for command in commands}
    assert targets == {"lint", "test", "test-slurm", "baseline"} and targets <= set(MAKE_TARGETS)
    assert all(f"make {target}" in read("README.md") for target in targets - {"lint"})


def test_ci_tests_each_python_and_keeps_the_report():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    supported = [f"3.{minor}" for minor in range(9, 20) if f"3.{minor}" in SpecifierSet(project["requires-python"])]
    assert CI["jobs"]["tests"]["strategy"]["matrix"]["python"] == supported
    [files] = [step["with"]["path"] for step in CI["jobs"]["baseline"]["steps"] if "upload" in step.get("uses", "")]
    report = f"results/{EMBEDDED_DEFAULTS['dataset']}/{EMBEDDED_DEFAULTS['model']}/baseline/report/"
    assert report in files.split() and f"{report}report.html" in read("README.md")


def test_the_citation_names_both_papers():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0" and citation["title"] and citation["message"] and citation["authors"]
    papers = {identifier["value"] for paper in citation["references"] for identifier in paper["identifiers"]}
    assert papers == {"arXiv:2403.18814", "arXiv:2309.02033"}


@pytest.mark.parametrize("page", ["CHANGELOG.md", "config/README.md"])
def test_links_of_a_page_have_existing_files(page):
    links = re.findall(r"\]\((?!http)([^)#]+)", read(page))
    assert all((PROJECT / page).parent.joinpath(link).is_file() for link in links)


def test_snakemakes_report_has_the_page_and_its_caption(finished, tmp_path):
    finished.run("baseline", "--report", str(tmp_path / "report.zip"))
    with zipfile.ZipFile(tmp_path / "report.zip") as report:
        names = report.namelist()
        texts = b"".join(report.read(name) for name in names if name.endswith((".html", ".js")))
    assert any(name.endswith("report.html") for name in names) and b"Comparison of experiments trained on" in texts


def test_one_version_is_stated_everywhere():
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    assert re.findall(r"^## \[(\d[^\]]*)\]", read("CHANGELOG.md"), flags=re.MULTILINE)[0] == version


def test_snakemake_finds_no_fault_in_the_rules():
    """Functions stand above their rule, which is the only thing that Snakemake's lint complains of."""
    printed = run_snakemake(["--lint"], PROJECT, dict(os.environ)).stderr
    assert set(re.findall(r"^    \* (.*)$", printed, re.MULTILINE)) == {"Mixed rules and functions in same snakefile.:"}
