"""Pinned environments: envs/*.yaml, one for each phase, and uv.lock, which combines them for a CPU."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from dj2mgm.script_modules import SCRIPTS, find_modules
from paths import PROJECT

MAKE_LOCK = "run `make lock`"
ENVIRONMENTS = sorted((PROJECT / "envs").glob("*.yaml"))
RULE = re.compile(r"^ *(?:rule|checkpoint) (\w+):\n((?: +.*\n|\n)+)", re.MULTILINE)

every_environment = pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.stem)
one_environment = pytest.mark.parametrize(
    "path",
    [path if path.stem == "train" else pytest.param(path, marks=pytest.mark.slow) for path in ENVIRONMENTS],
    ids=[path.stem for path in ENVIRONMENTS],
)


def load(path: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """Return channels, conda packages by name, and pip's pins."""
    environment = yaml.safe_load(path.read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert set(environment) == {"channels", "dependencies"} and set(pip) == {"pip"}
    return environment["channels"], dict(spec.split("=", 1) for spec in conda), pip["pip"]


def pins(lines: list[str]) -> dict[str, str]:
    """Return versions by canonical name; each line must pin one package to one exact version."""
    versions: dict[str, str] = {}
    for line in lines:
        requirement = Requirement(line)
        [specifier] = requirement.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, f"not pinned exactly: {line}"
        assert not (requirement.extras or requirement.marker or requirement.url), f"more than a version: {line}"
        name = canonicalize_name(requirement.name)
        assert name not in versions, f"listed twice: {name}"
        versions[name] = specifier.version
    return versions


def listed_versions() -> dict[str, str]:
    """Return the versions that pyproject.toml states."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    return pins(project["project"]["dependencies"] + project["dependency-groups"]["dev"])


def uv_lock() -> dict[str, dict]:
    """Return the packages of uv.lock except the project itself, by name."""
    packages = tomllib.loads((PROJECT / "uv.lock").read_text(encoding="utf-8"))["package"]
    by_name = {package["name"]: package for package in packages if "registry" in package["source"]}
    assert len(by_name) == len(packages) - 1, "a package has two versions, or is not from a registry"
    return by_name


def hashes(file: str) -> dict[str, list[str]]:
    """Return the hashes of a requirements*.lock by pin."""
    text = (PROJECT / file).read_text(encoding="utf-8")
    entries = re.findall(r"^(\S+==\S+) ;[^\\\n]+((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", text, re.MULTILINE)
    assert len(entries) == len(re.findall("^[^ #]", text, re.MULTILINE)), f"{file} holds lines of another form"
    return {pin: re.findall("sha256:([0-9a-f]{64})", digests) for pin, digests in entries}


def locked() -> dict[str, str]:
    """Return the versions that `make install` installs."""
    return pins(list(hashes("requirements.lock"))) | {"torch": listed_versions()["torch"]}


WITHOUT_PYTHON = {"check", "help"}  # rules that print a text


def rules() -> Iterator[tuple[str, str, Path, Path]]:
    """Return name, complete text, environment and script of every rule that runs Python."""
    for file in sorted((PROJECT / "rules").rglob("*.smk")):
        for name, body in RULE.findall(file.read_text(encoding="utf-8")):
            if "shell:" in body and name not in WITHOUT_PYTHON:
                [environment] = re.findall(r'conda:\s+"(.+)"', body)
                [script] = set(re.findall(r"(?:build_stage_command|quote_script_path)\(\s*[\"'](\w+\.py)", body))
                yield name, body, (file.parent / environment).resolve(), SCRIPTS / script


@cache
def imported_packages(module: Path) -> set[str]:
    """Return the top-level names that a module imports, without the standard library and the project itself."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    top_level = {name.split(".")[0] for name in names}
    own = {path.stem for path in SCRIPTS.iterdir()}
    return top_level - sys.stdlib_module_names - own


def resolve(requirements: list[str], *options: str) -> subprocess.CompletedProcess:
    """Return the resolution of uv, which reads metadata and downloads neither wheels nor interpreters."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    uv += ["--python", sys.executable, "--no-python-downloads", *options, "-"]
    return subprocess.run(uv, input="\n".join(requirements), capture_output=True, text=True)


@pytest.fixture(scope="module")
def package_index() -> None:
    probe = resolve(["pip==25.2"], "--no-cache")
    if probe.returncode:
        pytest.skip(f"the package index cannot be reached: {probe.stderr.strip().splitlines()[-1].strip()}")


@every_environment
def test_everything_in_an_environment_is_pinned_exactly(path):
    channels, conda, pip = load(path)
    assert channels[-2:] == ["conda-forge", "nodefaults"]
    assert {"python", "pip"} <= set(conda)
    for name, version in conda.items():
        assert re.fullmatch(r"\d+(\.\d+){1,2}", version), f"not pinned exactly: {name}={version}"
    assert pins(pip)


def test_training_is_pinned_to_cuda_12_4_and_matching_torch():
    channels, conda, pip = load(PROJECT / "envs/train.yaml")
    assert channels[0] == "nvidia/label/cuda-12.4.0"
    assert conda["cuda-toolkit"] == "12.4.0"
    assert int(conda["gxx_linux-64"].split(".")[0]) <= 13, "nvcc 12.4 takes no newer host compiler"
    versions = pins(pip)
    assert versions["torch"] == "2.6.0"
    assert versions["nvidia-cuda-runtime-cu12"].startswith("12.4."), "torch's own CUDA must be nvcc's"


def test_flash_attn_is_skipped_with_a_message_without_nvcc():
    script = PROJECT / "envs/train.post-deploy.sh"
    run = subprocess.run(["/bin/bash", script], env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "no nvcc" in run.stdout
    assert re.search(r"^VERSION=\d+\.\d+\.\d+(\.post\d+)?$", script.read_text(encoding="utf-8"), re.MULTILINE)


@one_environment
def test_an_environment_resolves_to_its_listed_packages(path, package_index):
    _, conda, pip = load(path)
    resolution = resolve(pip, "--python-version", conda["python"], "--python-platform", "x86_64-manylinux_2_28")
    assert resolution.returncode == 0, resolution.stderr
    unlisted = set(resolution.stdout.split()) - {f"{name}=={version}" for name, version in pins(pip).items()}
    assert not unlisted, f"{path.name} must pin these as well: {sorted(unlisted)}"


@pytest.mark.parametrize(("name", "body", "environment", "script"), list(rules()), ids=lambda value: str(value)[:30])
def test_a_rule_imports_only_packages_of_its_environment(name, body, environment, script):
    pinned = pins(load(environment)[2])
    assert not unlisted_imports(script, pinned), f"rule {name}, {environment.name}"
    launcher = "bash" if "launcher=" in body else "python"
    started = {"python": set(), "bash": {"deepspeed", "torch"}}  # launch.sh starts DeepSpeed's launcher or torchrun
    assert started.get(launcher, {launcher}) <= set(pinned)


@pytest.mark.parametrize("script", ["convert_mgm_checkpoint.py", "merge_adapter.py", "chat.py"])
def test_manual_scripts_run_in_the_training_environment(script):
    assert not unlisted_imports(SCRIPTS / script, pins(load(PROJECT / "envs/train.yaml")[2]))


@cache
def installed_distributions() -> dict[str, list[str]]:
    """Return the names of distributions by top-level package."""
    return dict(importlib.metadata.packages_distributions())


def unlisted_imports(script: Path, pinned: dict[str, str]) -> list[str]:
    """List the packages that a script's modules import and an environment lacks."""
    distributions = installed_distributions()
    return [
        f"{module.name} imports {package}"
        for module in find_modules(script)
        for package in imported_packages(module)
        if not {canonicalize_name(name) for name in distributions.get(package, [package])} & set(pinned)
    ]


def test_every_rule_and_environment_is_checked():
    texts = [file.read_text(encoding="utf-8") for file in (PROJECT / "rules").rglob("*.smk")]
    assert len(list(rules())) + len(WITHOUT_PYTHON) == sum(text.count(" shell:\n") for text in texts) > 2
    assert {environment for _, _, environment, _ in rules()} == set(ENVIRONMENTS)


def test_evaluation_and_foundation_pin_versions_of_training():
    training = pins(load(PROJECT / "envs/train.yaml")[2])
    for other in ("foundation", "evaluate"):
        for name, version in pins(load(PROJECT / f"envs/{other}.yaml")[2]).items():
            assert training.get(name, version) == version, f"{name} differs between {other}.yaml and train.yaml"


def test_these_tests_run_on_the_locked_versions():
    for name, version in locked().items():
        installed = Version(importlib.metadata.version(name)).public  # without the suffix +cpu
        assert installed == version, f"{name}: {installed} is installed, uv.lock says {version}"


def test_uv_lock_has_the_stated_versions_and_all_hashes():
    packages = uv_lock()
    assert listed_versions().items() <= {name: entry["version"] for name, entry in packages.items()}.items(), MAKE_LOCK
    for name, package in packages.items():
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        assert files and all(file["hash"].startswith("sha256:") for file in files), name


def test_requirements_lock_is_uv_lock_without_torch_and_its_cuda():
    packages, of_lock = uv_lock(), hashes("requirements.lock")
    versions = pins(list(of_lock))
    for pin, digests in of_lock.items():
        package = packages[Requirement(pin).name]
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        assert {file["hash"] for file in files} == {f"sha256:{digest}" for digest in digests}, f"{pin}: {MAKE_LOCK}"
        assert package["version"] == versions[package["name"]], MAKE_LOCK
    left_out = set(packages) - set(versions)
    assert "torch" in left_out and listed_versions().keys() - versions.keys() == {"torch"}
    assert all(name.startswith(("torch", "triton", "cuda-", "nvidia-")) for name in left_out), left_out


def test_lmms_eval_is_locked_with_hashes():
    lines = (PROJECT / "requirements-lmms_eval.txt").read_text(encoding="utf-8").splitlines()
    of_lock = hashes("requirements-lmms_eval.lock")
    assert pins(list(of_lock)) == pins([text for line in lines if (text := line.split("#")[0].strip())]), MAKE_LOCK
    assert all(of_lock.values())


def test_uv_lock_is_up_to_date(package_index):
    uv = [sys.executable, "-m", "uv", "lock", "--check", "--quiet", "--no-python-downloads"]
    checked = subprocess.run(uv, cwd=PROJECT, capture_output=True, text=True)
    assert checked.returncode == 0, f"{checked.stderr}\n{MAKE_LOCK}"


@pytest.mark.parametrize("python", [pytest.param("3.12", marks=pytest.mark.slow), "3.13"])
def test_the_versions_resolve_on_newer_python(python, package_index):
    pinned = [f"{name}=={version}" for name, version in locked().items()]
    resolution = resolve(pinned, "--python-version", python)
    assert resolution.returncode == 0, resolution.stderr


@pytest.mark.parametrize("file", ["Makefile", "Dockerfile"])
def test_installs_check_hashes(file):
    text = (PROJECT / file).read_text(encoding="utf-8").replace("\\\n", " ").replace("$(PIP_INSTALL)", "pip install")
    installs = [" ".join(line.split()) for line in re.findall(r"\bpip\b[^@&|\n]* install [^@&|\n]+", text)]
    installs = [line for line in installs if "--requirement" in line or "torch" in line.lower()]
    assert len(installs) >= 2
    for line in installs:
        assert re.search("--require-hashes --no-deps .*--requirement", line) or "torch==" in line or "$(TORCH)" in line


def test_the_image_names_its_base_by_digest():
    bases = re.findall(r"^FROM (.+)$", (PROJECT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert bases and all(re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", base) for base in bases)


def test_the_lock_lists_all_requirements_of_its_packages():
    lock = locked()
    for name in lock:
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required = canonicalize_name(requirement.name)
                # a torch build pins its own CUDA packages; a CPU build has none
                assert required in lock or name == "torch", f"{name} requires {required}, not in requirements.lock"
    assert not {"torchvision", "timm", "open-clip-torch"} & set(lock), "replaces a CPU torch by a CUDA build"
