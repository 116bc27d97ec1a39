"""Metrics of captions and answers, benchmarks, intervals, leaks."""
