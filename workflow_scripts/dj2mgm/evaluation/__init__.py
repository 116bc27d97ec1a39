"""Evaluation of trained models: metrics of captions and answers, benchmarks, intervals, leaks."""
