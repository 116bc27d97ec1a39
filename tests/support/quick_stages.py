"""A project whose stages write small results immediately instead of training, for tests of the rules."""

from forked_python import NO_LIBRARIES
from small_project import Project

STAGES = ("make_dataset", "unpack_foundation", "train_clip", "train_language_model", "assemble_model", "filter_data")
STAGES += ("write_jsonl", "pretrain", "finetune", "generate_answers", "evaluate_clip", "evaluate_vqa")
# Replaces a stage's script. It writes every file that the rule may declare, and others.
QUICK = """\
# Writes small results at once. A file `<stage>-<seed>.wait` in the project's folder makes a stage wait forever, and
# `<stage>-diverges` lets it fail once.
import json, random, sys, time
from pathlib import Path

stage, folder = Path(sys.argv[0]).stem, Path(sys.argv[sys.argv.index("--output-dir") + 1])
*_, parent, run = folder.parent.parts  # results/<dataset>/[<model>/]<experiment>/[seed-<n>/]<stage>
is_seed = run.startswith("seed-")
seed, experiment = (int(run.removeprefix("seed-")), parent) if is_seed else (0, run)
with open("calls.txt", "a") as calls:
    calls.write(f"{stage} {experiment} {seed}\\n")
while Path(f"{stage}-{seed}.wait").exists():
    time.sleep(0.05)
if Path(f"{stage}-diverges").exists() and experiment != "baseline":
    Path(f"{stage}-diverges").unlink()
    sys.exit(f"error: {stage}: training diverged by step 3: the loss is nan.")

def write(name, rows=None, value=None):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\\n" for row in rows) if rows is not None else json.dumps(value))

images = [f"e{number:02d}" for number in range(40)]
chance = random.Random(f"{experiment} {seed}")
difficulty = random.Random("images")
level = LEVELS.get(experiment, 0) + SPREAD * chance.gauss(0, 1)
scores = []
for image in images:
    own_value = level + 0.05 * difficulty.gauss(0, 1) + 0.02 * chance.gauss(0, 1)
    for kind, value in (("own", own_value), ("shuffled", own_value / 2)):
        values = {"answer_probability": [value, 1], "answer_log_likelihood": [2 * value - 3, 1]}
        scores.append({"model": "finetune", "images": kind, "id": image, "values": values})
for name in ("filtered", "stats", "dropped", "pretrain", "finetune", "captions", "answers", "likelihoods", "scored"):
    write(f"{name}.jsonl", [])
row = {"id": "e00", "image": "e00.png", "captions": ["a cat"], "objects": [], "questions": []}
write("evaluation.jsonl", [row])
write("finetune.json", value=[])
write("metrics.jsonl", [{"step": step, "loss": 2 - step / 100} for step in range(1, 41)])
write("scores.jsonl", scores if stage == "evaluate_vqa" else [])
judges = [{"name": "clip", "kind": "CLIP", "selects": [], "sees": False}]
groups = {"finetune/own": {"answer_probability": {}}} if stage == "evaluate_vqa" else {}
metrics = {"seed": seed, "steps": 40, "groups": groups, "judges": judges, "questions": 1, "prompt": ""}
metrics |= {"engine": {}, "rows": 40, "samples": 40, "planned_steps": 40, "train_seconds": 60.0, "versions": {}}
write("metrics.json", value=metrics)
row_count = 9 if experiment == "baseline" else 8
rows = {"pretrain": {"rows_in": 9, "rows_out": row_count, "dropped": {}, "repeated": 0}}
rows["finetune"] = {"rows_in": 0, "rows_out": 0, "dropped": {}, "repeated": 0}
counts = rows if stage == "write_jsonl" else {"pretrain": 9, "finetune": 0, "evaluation": 1}
recipe_counts = {"rows_in": 1, "rows_kept": 1, "broken_images": {}}
recipe_summary = recipe_counts | {"operators": [], "data_juicer": "1.6.1", "input": {}}
write("summary.json", value=counts | recipe_summary)
write("memory.csv", value="")
columns = "attempt,time,seconds,phase,job_gib,host_gib,cgroup_gib"
(folder / "memory.csv").write_text(f"{columns}\\n1,2026-01-01T00:00:00+00:00,0,training,1.0,9.0,\\n")
names = ["config.json", "model.safetensors", "projector.safetensors", "preprocessor_config.json", "tokenizer.json"]
names += ["tokenizer_config.json", "processor_config.json", "generation_config.json", "special_tokens_map.json"]
names += ["vocab.json", "merges.txt", "language_model.safetensors", "chat_template.jinja"]
parts = ("", "clip/", "convnext/", "language_model/") if "foundation" in str(folder) else ("", "adapter/")
for part in parts:
    for name in (*names, "adapter_config.json", "adapter_model.safetensors"):
        write(part + name, value={})
"""


def replace_stages(project: Project, levels: dict[str, float], spread: float) -> None:
    """Replace the stages by scripts that write scores around each experiment's level, with `spread` between seeds."""
    text = NO_LIBRARIES + QUICK.replace("LEVELS", repr(levels)).replace("SPREAD", repr(spread))
    for stage in STAGES:
        (project.folder / "workflow_scripts" / f"{stage}.py").write_text(text, encoding="utf-8")


def read_calls(project: Project) -> list[str]:
    """Return "<stage> <experiment> <seed>" of each stage that ran."""
    file = project.folder / "calls.txt"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []
