# Input functions of rules/dataset.smk.
from dj2mgm.dataset_resolution.experiment_dataset import (
    list_dataset_files,
    list_image_path_files,
)


def dataset_images(wildcards):
    """Params function: a digest of the user's own images in a dataset."""
    return FINGERPRINTS.hash_images(
        list_image_path_files(find_used_dataset(wildcards).settings)
    )


def source_files(wildcards):
    """Input function: the user's own files of a dataset; none of the embedded one."""
    with raising_user_errors():
        return check_user_files(
            list_dataset_files(find_used_dataset(wildcards).settings)
        )
