"""A page to look at data with: rows with their images, statistics and thresholds; served, or one file."""
