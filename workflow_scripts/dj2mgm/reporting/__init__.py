"""Pages that show and compare results."""
