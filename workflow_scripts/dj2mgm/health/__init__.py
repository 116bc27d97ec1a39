"""Checks of this machine, and the search for the cause of a failure."""
