# What jobs ask for, and how they run a script.
import shlex

from dj2mgm.config.stages import gpus_on_one_node

# A stage takes this machine's first GPUs, so it claims all cores: one such stage at a time, however many --cores. On a
# cluster each job has its own GPUs, and cpus_per_task in the profile says how many cores.
GPU_STAGE_THREADS = max(8, workflow.resource_settings.cores or 1)
with user_errors():
    NODES = RUNS.nodes


def several_nodes():
    """What Snakemake's Slurm plugin wants in order to start a command once and leave the nodes to its srun."""
    return (
        {}
        if NODES == 1
        else {"nodes": NODES, "tasks": NODES, "tasks_per_gpu": -1, "mpi": "srun"}
    )


def mem_with_retries(mem_mb):
    """Resource function: half as much memory again at each further attempt, for jobs that ran out of it.

    `mem_mb` is a number, or a function of the wildcards that returns one.
    """

    def mem(wildcards, attempt):
        first = mem_mb(wildcards) if callable(mem_mb) else mem_mb
        return first * (attempt + 1) // 2

    return mem


def gpus(wildcards):
    return RUNS.at(wildcards.run).config["gpus"]


def gpus_of_a_node(wildcards):
    return gpus_on_one_node(RUNS.at(wildcards.run).config)


def filter_gpus(wildcards):
    """One where the filter's recipe judges by a CLIP, else none."""
    return int("clip" in RUNS.at(wildcards.run).settings["filter"])


def script_path(name):
    """A script, as a word of a shell line that Snakemake formats."""
    path = os.path.relpath(SCRIPTS / name)
    return shlex.quote(path).replace("{", "{{").replace("}", "}}")


def stage_command(name, arguments, launcher=""):
    """A stage's shell command. Its log keeps what it prints; when it fails, a diagnosis ends the log.

    The console shows what it takes from the log. Without a console, everything is shown: STAGE_OUTPUT is then the
    descriptor to print to.

    `launcher` starts the script in several processes: the arguments of launch.sh.
    """
    starts = f"bash {script_path('launch.sh')} {launcher}" if launcher else "python"
    shown = '3> /dev/null >&"${{STAGE_OUTPUT:-3}}"'
    diagnosed = f"python {script_path('diagnose.py')} {{log:q}} --exit-status $?"
    return f"{starts} {script_path(name)} {arguments} 2>&1 | tee {{log:q}} {shown} || {diagnosed} {shown}"
