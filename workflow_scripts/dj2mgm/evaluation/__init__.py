"""Metrics of captions and answers, intervals, leaks."""
