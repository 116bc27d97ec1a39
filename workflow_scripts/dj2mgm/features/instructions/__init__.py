"""Operators of recipes with `rows: instructions`, which write and check questions about images and their answers."""
