"""Verdicts: which data are better, how sure that is, what it cost, and the next step."""
