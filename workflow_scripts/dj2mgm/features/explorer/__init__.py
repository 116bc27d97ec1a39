"""The explorer: a page of rows with images, statistics and movable limits, from a server or as one file."""
