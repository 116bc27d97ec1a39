"""`snakemake publish`, from a finished run to files on a hub."""

from dj2mgm.storage.files import read_json
from forked_snakemake import run_snakemake
from hub_server import TOKEN, HubServer
from small_project import Project

KEYS = "repository: me/mine, dataset_repository: me/pairs"
PUBLISH = f"{{{KEYS}, allow_unlearned: true}}"  # the small model learns nothing in a few steps
# job_counts omits rules whose names begin with the target's name
PUBLISH_RULES = {"export_data": 1, "push_model": 1, "push_dataset": 1}


def publish(project: Project, hub: HubServer, **variables: str) -> tuple[int, str]:
    hub_variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(project.folder / "home"),
    }
    # push_to_hub.py reads the address and is not forked
    environment = project.environment() | hub_variables | variables
    process = run_snakemake(
        project.arguments("publish", config=("experiment=baseline", f"publish={PUBLISH}")), project.folder, environment
    )
    assert TOKEN not in process.stdout + process.stderr
    return process.returncode, process.stdout + process.stderr


def test_nothing_runs_without_a_license(fresh):
    printed = fresh.run("publish", ok=False, config=("experiment=baseline", f"publish={PUBLISH}"))
    assert (
        "small has no license, and nothing is published without one; state license in config/datasets/small.yaml"
        in " ".join(printed.split())
    )
    assert not (fresh.folder / "results").exists()


def test_finished_run_is_published_without_retraining(licensed):
    """A model that has learned nothing is refused before anything is copied, unless a setting allows it."""
    printed = " ".join(licensed.run("publish", ok=False, config=("experiment=baseline", f"publish={{{KEYS}}}")).split())
    assert "publish: the model of baseline has learned nothing measurable. " in printed
    again = "then run `snakemake baseline` again"
    assert f"{again}, or add `--config publish='{{allow_unlearned: true}}'`" in printed
    assert not (licensed.folder / "results/published").exists() and not licensed.result("export").exists()
    report = {"write_explorers": 1, "compare_experiments": 1}  # the report shows licenses
    assert (
        licensed.job_counts("publish", config=("experiment=baseline", f"publish={PUBLISH}")) == PUBLISH_RULES | report
    )
    folder = licensed.folder / "results/published/small/small/baseline"
    with HubServer() as hub:
        status, printed = publish(licensed, hub)
        assert status != 0 and "no token was found to push it with" in " ".join(printed.split())
        assert (folder / "model/README.md").is_file() and (folder / "dataset/README.md").is_file()
        status, printed = publish(licensed, hub, HF_TOKEN=TOKEN)
        assert status == 0, printed[-3000:]
        for part, key in (("model", "models/me/mine"), ("dataset", "datasets/me/pairs")):
            local = {str(file.relative_to(folder / part)) for file in (folder / part).rglob("*") if file.is_file()}
            assert set(hub.repositories[key].files) - {".gitattributes"} == local
            assert hub.repositories[key].private and len(hub.repositories[key].commits) == 1
            assert read_json(folder / f"{part}.pushed.json")["repository"] in key
    assert licensed.job_counts("publish", config=("experiment=baseline", f"publish={PUBLISH}")) == {}
    content = b"".join(file.read_bytes() for file in licensed.folder.rglob("*.log"))
    assert TOKEN.encode() not in content
