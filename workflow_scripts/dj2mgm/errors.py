"""The error that a user can fix. Any other exception is a defect of the workflow and keeps its traceback."""


class InputError(Exception):
    """The input, not the program, is at fault: one sentence that says what, where (file and row, or key), and the
    remedy."""
