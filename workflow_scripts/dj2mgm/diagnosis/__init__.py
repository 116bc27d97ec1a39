"""Finds the cause of a failed stage in its log, by signatures of known failures."""
