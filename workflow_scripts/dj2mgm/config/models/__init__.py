"""Models: CLIPs, tiny and downloaded models, models without a file, and chat formats."""
