"""Checks whether this machine can train, with a remedy for each problem."""
