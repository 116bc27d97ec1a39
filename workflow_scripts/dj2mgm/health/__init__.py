"""Checks whether this machine can train, and finds the cause of a failed stage in its log."""
