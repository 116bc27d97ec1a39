"""Studies: variants of an experiment by a design or a search, compared on one page."""
