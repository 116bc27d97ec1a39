"""The memory plan of a training stage, and its time."""
