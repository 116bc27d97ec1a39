"""Known, local, downloaded and missing model files."""
