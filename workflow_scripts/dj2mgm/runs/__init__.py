"""Runs: experiments merged from layers, their seeds and folders, reuse of stages, the table of stages, pages."""
