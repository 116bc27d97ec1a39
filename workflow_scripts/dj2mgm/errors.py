"""Error that a user can fix; any other exception is a defect of the workflow and keeps its traceback."""


class InputError(Exception):
    """Mistake in the input: one sentence with the problem, its location (file and row, or key) and the remedy."""


class UnsuitableDatasetError(InputError):
    """Mistake only if the experiment is requested: its recipe is for datasets with other parts."""
