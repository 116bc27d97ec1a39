"""Examples in docs/examples run as documented in docs/extending.md, and the pages name existing files.

Operator, benchmark and chat template have separate tests, which docs/extending.md names.
"""

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from dj2mgm.evaluation.caption_metrics import CaptionJudge
from dj2mgm.evaluation.groups import estimate_metrics
from dj2mgm.health import diagnosis
from dj2mgm.health.failure_signature import read_log
from dj2mgm.health.probes import probe_host
from dj2mgm.script_modules import SCRIPTS, find_modules
from dj2mgm.settings.configuration import Configuration
from dj2mgm.settings.models import MgmModel
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import read_json, write_jsonl
from forked_snakemake import run_snakemake
from markdown_links import build_anchor
from paths import PROJECT
from write_configuration import BEGIN, END

LIBRARY = SCRIPTS / "dj2mgm"
EXAMPLES = PROJECT / "docs/examples"
PAGES = sorted([PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")])
EXTENDING = (PROJECT / "docs/extending.md").read_text(encoding="utf-8")
ARCHITECTURE = (PROJECT / "docs/architecture.md").read_text(encoding="utf-8")
WITHOUT_TABLES = re.sub(f"{BEGIN}.*?{END}", "", ARCHITECTURE, flags=re.DOTALL)
NEW = {  # files that a reader of docs/extending.md creates
    "config/chat_templates/phi3.yaml",
    "config/models/mgm-phi3.yaml",
    "rules/count_words.smk",
    "tests/fixtures/logs/a-network-folder-was-unmounted.log",
    "tests/fixtures/logs/a-network-folder-was-unmounted.near-miss.log",
    "workflow_scripts/count_words.py",
    "workflow_scripts/dj2mgm/features/challenge/benchmarks/yes_no.py",
    "workflow_scripts/dj2mgm/juicer/operators/color_captioning_mapper.py",
    "workflow_scripts/dj2mgm/juicer/operators/word_frequency_filter.py",
}
IMPORT = r"^from dj2mgm[\w.]* import (?:\([^)]*\)|[^(]+?)$"  # in a Snakefile
TOP = ("config", "docs", "rules", "tests", "workflow_scripts")
PACKAGES = "|".join(sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py")))
IN_LIBRARY = re.compile(rf"`((?:{PACKAGES})/[\w/]+\.py)`")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paths_in(text: str) -> set[str]:
    """Return code-formatted paths of the project, without patterns such as `config/models/<name>.yaml`."""
    return {path for path in re.findall(r"`([\w./-]+)`", text) if path.split("/")[0] in TOP and "/" in path}


def tree() -> list[str]:
    """Return the paths of the annotated tree, which is indented by two spaces."""
    block = ARCHITECTURE.split("```")[1]
    paths, folders = [], []
    for indent, name in re.findall(r"^( *)([\w.-]+/?) ", block, flags=re.MULTILINE):
        folders[len(indent) // 2 :] = [name]
        paths.append("".join(folders))
    return paths


@pytest.mark.parametrize("text", [EXTENDING, WITHOUT_TABLES], ids=["extending", "architecture"])
def test_each_path_in_code_format_exists(text):
    in_library = set(IN_LIBRARY.findall(text))
    assert in_library and {path for path in in_library if not (LIBRARY / path).is_file()} == set()
    assert {path for path in paths_in(text) - in_library - NEW if not (PROJECT / path).exists()} == set()


def test_trees_and_tables_have_only_existing_paths():
    assert {path for path in tree() if not (PROJECT / path).exists()} == set()
    examples = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert examples == set(re.findall(r"examples/([\w.]+)\)", EXTENDING))


def test_table_of_modules_has_each_module_of_the_library():
    modules = (path for path in LIBRARY.iterdir() if not path.name.startswith("__"))
    entries = {f"{path.name}/" if path.is_dir() else path.name for path in modules}
    assert entries == set(re.findall(r"^\| \d+ \| `([\w.]+/?)` \| \S", ARCHITECTURE, flags=re.MULTILINE))


def test_each_feature_has_a_page():
    features = {path.parent.name for path in LIBRARY.glob("features/*/__init__.py")}
    assert features == {path.stem for path in (PROJECT / "docs/features").glob("*.md")}


def test_each_hook_of_features_is_listed():
    hooks = ARCHITECTURE.split("## The parts of one feature")[1].split("\n## ")[0]
    code = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS.rglob("*.py"))
    parts = set(re.findall(r'import_feature_modules\("(\w+)"\)', code))
    assert parts == set(re.findall(r"features/<name>/(?:<name>_)?(\w+)(?:\.py|/)", hooks))
    rules = "\n".join(path.read_text(encoding="utf-8") for path in (PROJECT / "rules/features").glob("*.smk"))
    extended = set(re.findall(r"^([A-Z_]+)(?:\[.+\] =|\.append|\.add| \|=)", rules, flags=re.MULTILINE))
    assert extended == set(re.findall(r"^- `([A-Z_]+)`: ", hooks.split("In the rules of the slice:")[1], re.MULTILINE))


def test_snakemake_starts_without_torch_and_data_juicer(tmp_path):
    rules = [PROJECT / "Snakefile", *(PROJECT / "rules").rglob("*.smk")]
    imports = [re.findall(IMPORT, path.read_text(encoding="utf-8"), flags=re.MULTILINE) for path in rules]
    script = tmp_path / "all_rules.py"
    script.write_text("\n".join(chain(*imports)), encoding="utf-8")
    modules = [path for path in find_modules(script) if path != script]
    packages = {path.relative_to(LIBRARY).parts[0] for path in modules if path.parent != LIBRARY}
    low = {"cli", "dataset_resolution", "model_files", "recipes", "settings", "storage"}
    assert packages == {"features", "runs", "training"} | low
    slow = re.compile(r"^(import|from) (torch|transformers|data_juicer|numpy|pandas|PIL|pyarrow)\b", flags=re.MULTILINE)
    assert [path for path in modules if slow.search(path.read_text(encoding="utf-8"))] == []


def defines(file: Path, name: str) -> bool:
    """Return whether a file defines a name, or the class and the method of `Class.method`."""
    text = file.read_text(encoding="utf-8")
    first, _, method = name.partition(".")
    patterns = [rf"^ *(- )?(def |class )?{first}\b", *([rf"^    def {method}\b"] if method else [])]
    return all(re.search(pattern, text, flags=re.MULTILINE) for pattern in patterns)


@pytest.mark.parametrize("text", [EXTENDING, ARCHITECTURE], ids=["extending", "architecture"])
def test_named_files_define_the_named_objects(text):
    entries = re.findall(r"`([\w/.]+)`\s\(`([\w.]+)`", text)
    assert len(entries) > 10
    for path, name in entries:
        file = LIBRARY / path if (LIBRARY / path).is_file() else PROJECT / path
        assert defines(file, name), f"{path} lacks {name}"


def test_classes_and_constants_in_code_format_are_defined():
    texts = [EXTENDING, ARCHITECTURE, *(path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py"))]
    names = set(re.findall(r"`((?:[A-Z][A-Z_]+|[A-Z]\w*[a-z]\w*)(?:\.\w+)?)`", "\n".join(texts)))
    files = [*SCRIPTS.rglob("*.py"), *(PROJECT / "rules").rglob("*.smk"), PROJECT / "Snakefile"]
    foreign = {"AutoModelForImageTextToText", "Snakefile"}
    assert "CaptionJudge.compute_metrics" in names
    assert {name for name in names - foreign if not any(defines(file, name) for file in files)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(PROJECT).as_posix())
def test_links_of_a_page_have_existing_targets(page):
    for link in re.findall(r"(?<!!)\[[^]]*\]\((?!http)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE) if heading else []
        assert not heading or heading in map(build_anchor, headings), link


def test_the_captioner_writes_a_caption_for_each_image(tmp_path):
    from data_juicer.ops import load_ops
    from data_juicer.ops.base_op import OPERATORS
    from PIL import Image

    module = load("captioner")
    try:
        [operator] = load_ops([{module.NAME: {}}])
        for color in ("red", "blue"):
            Image.new("RGB", (8, 8), color).save(tmp_path / f"{color}.png")
        images = [[str(tmp_path / "red.png")], [str(tmp_path / "blue.png")]]
        texts = operator.process({operator.text_key: ["", ""], operator.image_key: images})[operator.text_key]
    finally:
        OPERATORS.modules.pop(module.NAME)
    assert ["a mostly red picture" in texts[0], "a mostly blue picture" in texts[1]] == [True, True]


def test_the_metric_has_a_mean_and_an_interval_and_is_called_in_the_last_line():
    module, last_line = load("metric"), inspect.getsource(CaptionJudge.compute_metrics).splitlines()[-1]
    assert f"{last_line} | length_metrics(captions, self.rows)\n" in module.__doc__
    metrics = module.length_metrics(["a red circle", "a dog"], [{"image_id": "a"}, {"image_id": "b"}])
    words = estimate_metrics(metrics)["caption_words"]
    assert words.mean == 2.5 and words.images == 2 and words.low < 2.5 < words.high


@pytest.mark.parametrize(("cores", "status"), [(1, "warn"), (8, "pass")])
def test_the_doctors_check_judges_the_number_of_cores(cores, status):
    finding = load("doctor_check").check_cores(replace(probe_host(Path("results")), cores=cores))
    assert finding.status == status and bool(finding.remedy) == (status == "warn")


def test_the_signature_is_found_in_a_log_and_explained(tmp_path, monkeypatch):
    signature = load("signature").UNMOUNTED_FOLDER
    assert signature.title not in {known.title for known in diagnosis.SIGNATURES}
    assert f"tests/fixtures/logs/{build_anchor(signature.title)}.log" in NEW
    log = tmp_path / "stage.log"
    log.write_text("step 3\nOSError: [Errno 107] Transport endpoint is not connected: 'a.jpg'\n")
    assert diagnosis.find_cause(read_log(log)) is None
    monkeypatch.setattr(diagnosis, "SIGNATURES", (signature,))
    text = str(diagnosis.find_cause(read_log(log)))
    assert "A network folder was unmounted" in text and "a.jpg" in text and "fusermount" in text
    log.write_text("OSError: [Errno 28] No space left on device\n")
    assert diagnosis.find_cause(read_log(log)) is None


def test_the_model_file_has_known_keys_and_values():
    model = yaml.safe_load((EXAMPLES / "model.yaml").read_text(encoding="utf-8"))
    assert model["template"] == model["pretrain_template"] == "phi3"
    # tests/unit/data/test_chat_template.py tests the chat template
    validate_settings(MgmModel, model | {"template": "gemma", "pretrain_template": "gemma"}, "model.yaml")
    validate_settings(Configuration, model["settings"], "model.yaml, settings")


@pytest.fixture
def project(tmp_path) -> Path:
    """Copy the project and add the example's stage: script, rule, include and entry."""
    for part in ("Snakefile", "rules", "envs", "config", "profiles", "report", "workflow_scripts"):
        source = PROJECT / part
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / part)
    shutil.copy(EXAMPLES / "stage.py", tmp_path / "workflow_scripts/count_words.py")
    shutil.copy(EXAMPLES / "stage.smk", tmp_path / "rules/count_words.smk")
    with (tmp_path / "Snakefile").open("a", encoding="utf-8") as snakefile:
        snakefile.write('\n\ninclude: "rules/count_words.smk"\n')
    [entry] = re.findall(r"```python\n# \S+stages\.py, .*\n((?:.*\n)+?)```", EXTENDING)
    stages = tmp_path / "workflow_scripts/dj2mgm/runs/stages.py"
    before, pretrain, after = stages.read_text(encoding="utf-8").partition('    "pretrain": Stage(')
    assert pretrain
    stages.write_text(before + entry + pretrain + after, encoding="utf-8")
    return tmp_path


def test_the_stage_is_part_of_each_run_and_counts_words(project):
    planned = run_snakemake(["--cores", "1", "--dry-run", "--verbose", "baseline"], project, dict(os.environ))
    assert planned.returncode == 0, planned.stderr
    assert "results/shapes/tiny/baseline/count_words/words.json" in planned.stdout + planned.stderr

    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a cat and a dog"}]
    write_jsonl(project / "pretrain.jsonl", [{"id": "1", "image": "/a.jpg", "conversations": turns}])
    script = [sys.executable, "workflow_scripts/count_words.py", "--data", "pretrain.jsonl", "--output-dir", "out"]
    subprocess.run(script, cwd=project, check=True)
    assert read_json(project / "out/words.json") == {"a": 2, "cat": 1, "and": 1, "dog": 1}
