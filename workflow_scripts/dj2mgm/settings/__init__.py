"""Typed settings with defaults, limits and descriptions."""
