# Input functions of rules/search.smk.
from dj2mgm.runs.studies import search_batches
from dj2mgm.runs.studies.study_designs import locate_study_file


def study_budget_file(wildcards):
    """Input function: the file with the budget of a search."""
    return locate_study_file(wildcards.study)


def earlier_scores(wildcards):
    """Input function: the scores of the batches before a batch."""
    return search_batches.list_score_files(
        find_requested_search(wildcards), int(wildcards.number)
    )


def batch_trials(wildcards):
    """Input function: the trials of a batch; none for batch 0, the experiment that they change."""
    if wildcards.number == "0":
        return []
    trials = checkpoints.ask_trials.get(**wildcards).output[0]
    RUNS.add_trials(wildcards.study)
    return trials


def trials_flag(wildcards, input):
    """Params function: the flags for the trials of a batch, and for the earlier batches."""
    earlier = optional_flag("--earlier", "earlier")(wildcards, input)
    return ["--trials", input.trials, *earlier] if input.trials else []


def reference_rows(wildcards):
    """Input function: the number of rows that the baseline's recipe keeps."""
    return search_batches.locate_reference_summary(RUNS)


def scored_files(wildcards):
    """Input function: the files that the scores of a batch are read from."""
    batch_trials(wildcards)
    with raising_user_errors():
        return search_batches.list_batch_files(
            RUNS, find_requested_search(wildcards), int(wildcards.number)
        )
