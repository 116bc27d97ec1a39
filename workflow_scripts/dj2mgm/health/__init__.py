"""Checks of this machine before a training, and the search for a failed stage's cause in its log."""
