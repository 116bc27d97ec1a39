# Input functions of rules/decide.smk.
from dj2mgm.runs.studies import looks


def budget_file(wildcards):
    """Input function: the budget of the decision about the experiment that the configuration names."""
    with raising_user_errors():
        experiment = looks.check_decidable(RUNS)
    target_files(experiment)(wildcards)
    return f"results/{looks.locate_decision_folder(RUNS, experiment)}/budget.yaml"


def locate_look_file(experiment, number):
    """Return the file of the look after a number of seeds."""
    return f"results/{looks.locate_decision_folder(RUNS, experiment)}/seeds-{number}/look.yaml"


def earlier_looks(wildcards):
    """Input function: the looks after fewer seeds."""
    numbers = range(looks.MIN_SEEDS, int(wildcards.number))
    return [locate_look_file(wildcards.decided, number) for number in numbers]


def look_inputs(wildcards):
    """Input function: the results of both sides that a look reads."""
    with raising_user_errors():
        return looks.list_look_inputs(RUNS, wildcards.decided, int(wildcards.number))


def all_looks(wildcards):
    """Input function: all looks up to the last one; after each of them, Snakemake calls it again."""
    budget_file(wildcards)

    def file_after(number):
        return checkpoints.take_look.get(
            decided=RUNS.shared.experiment[0], number=number
        ).output[0]

    with raising_user_errors():
        return looks.list_looks(RUNS, file_after)
