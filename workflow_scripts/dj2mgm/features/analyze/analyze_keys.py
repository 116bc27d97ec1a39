"""Targets of the configuration's keys."""

TARGETS_BY_KEY = {"experiment": ("analyze",)}
