"""The embedded dataset: drawn scenes with captions, questions, and planted faults at known rates."""
