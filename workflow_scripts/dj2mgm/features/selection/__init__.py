"""Operators that select rows: by likelihoods, ratings, balance or near-duplicates."""
