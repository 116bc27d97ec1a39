"""Models that operators use, and files of what the models answered."""
