"""Decisions: more seeds of an experiment and its opponents until each verdict is decided, or a budget is spent."""
