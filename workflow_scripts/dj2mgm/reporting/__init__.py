"""Pages that show and compare results: reports, analyses and the explorer."""
