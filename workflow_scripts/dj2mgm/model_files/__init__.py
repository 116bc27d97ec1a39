"""Model files at the workflow's start: known, local, downloaded and missing models and CLIPs."""
