"""Experiments merged from layers, their seeds and folders, reuse and table of stages."""
