# Input functions of rules/features/check.smk.
from dj2mgm.features.check.check_settings import build_check_settings


def check_settings(wildcards):
    """Return the settings of the check of a dataset."""
    with raising_user_errors():
        return build_check_settings(RUNS, wildcards.dataset)
