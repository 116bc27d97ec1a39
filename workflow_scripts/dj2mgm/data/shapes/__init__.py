"""Embedded dataset of drawn scenes with planted faults."""
