"""Check of a dataset before a training: what was read, what is left out, and what a comparison can show."""

ERROR = "error: "  # begins the text about a problem, with which the command fails
