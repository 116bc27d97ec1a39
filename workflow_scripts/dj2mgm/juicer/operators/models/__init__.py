"""Models that operators use, and the files of their captions."""
