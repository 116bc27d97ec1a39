# Resources of jobs: threads, GPUs, nodes, memory.
from dj2mgm.cli.console import raising_user_errors
from dj2mgm.runs.stage_settings import count_gpus_per_node

# A stage on the GPU uses this machine's first GPUs. It claims all cores, so that only one such stage runs at a time. On a
# cluster, each job has its own GPUs, and cpus_per_task in the profile sets its cores.
GPU_STAGE_THREADS = max(8, workflow.resource_settings.cores or 1)
with raising_user_errors():
    NODES = RUNS.nodes

# Main memory of a job's first attempt in MB. The values are estimates, not fitted to measurements. A job that runs out of
# memory gets more at its next attempt.
# Stages without a large model: data, scores and pages. Data stages take at most 1.3 GiB for 1 000 000 rows
# (docs/data_performance.md).
SMALL_STAGE_MB = 4000
# Scripts that read a few small files.
SCRIPT_MB = 2000
# Trainings of the parts of the embedded tiny models.
TINY_TRAINING_MB = 6000
# Stages that measure all images with CLIP, or read a task of lmms-eval.
CLIP_STAGE_MB = 8000
# Stages that hold the weights of a whole model or a large CLIP once.
WEIGHTS_STAGE_MB = 16000
# Stages that load a model to use it. Not measured. The largest model in config/models has 9 GB of weights
# (docs/models.md).
MODEL_STAGE_MB = 24000
# Trainings. Stage 1, LoRA and `adamw_8bit` take at most 14 GiB with MGM-2B (docs/measurements/training.md). Full
# fine-tuning with its optimizer on the host takes 71 GiB (docs/measurements/memory.md), which only the third attempt has.
TRAINING_STAGE_MB = 48000


def stage_resources(mem_mb, minutes):
    """Return a stage's resources: time, and memory that grows by half of the first attempt's at each further attempt.

    Args:
        mem_mb: memory of the first attempt in MB, or a function of the wildcards that returns it.
        minutes: limit of the stage's time, for schedulers.
    """

    def mem(wildcards, attempt):
        first = mem_mb(wildcards) if callable(mem_mb) else mem_mb
        return first * (attempt + 1) // 2

    return {"mem_mb": mem, "runtime": minutes}


def single_node_gpus(wildcards):
    """Resource function: the GPUs of a stage that runs on one node."""
    return count_gpus_per_node(RUNS.by_folder(wildcards.run).config)
