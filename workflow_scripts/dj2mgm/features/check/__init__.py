"""Check of a dataset before a training: what was read, what is left out, and what a comparison can show."""
