"""Contents of files that the workflow writes for later stages or runs."""
