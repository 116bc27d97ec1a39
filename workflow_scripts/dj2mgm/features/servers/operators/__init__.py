"""Operators of recipes, which are found by this folder."""
