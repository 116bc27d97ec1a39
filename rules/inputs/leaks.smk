# Input functions of rules/leaks.smk.
from dj2mgm.runs.leaks import list_decontamination_files


def decontamination_files(wildcards):
    """Input function: the user's own files that training images are compared with."""
    with raising_user_errors():
        return check_user_files(list_decontamination_files(RUNS))
