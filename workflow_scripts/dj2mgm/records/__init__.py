"""Contents of files that the workflow writes itself, for a later stage or a later run to read."""
