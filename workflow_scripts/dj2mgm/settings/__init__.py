"""Typed settings: one class for each section of the configuration, with types, defaults, limits and descriptions."""
