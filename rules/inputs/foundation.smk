# Input functions of rules/foundation.smk.
import os
from glob import escape, glob

from dj2mgm.model_files.missing_models import list_part_files
from dj2mgm.settings.config_files import locate_config_file


def list_shipped_foundation(model):
    """Return the trained parts of a tiny model that come with the workflow."""
    folder = os.path.relpath(RUNS.shipped_foundations[model])
    return sorted(glob(f"{escape(folder)}/*/*"))


def assembled_files(wildcards):
    """Input function: the files of the folders that an MGM is assembled from."""
    return check_user_files(list_part_files(MODELS[wildcards.model]))


def list_chat_templates(*names):
    """Return chat templates that a script reads by name, as inputs."""
    files = (locate_config_file("chat_templates", f"{name}.yaml") for name in names)
    return [os.path.relpath(file) for file in files]
