"""Embedded dataset of rendered scenes with planted faults."""
