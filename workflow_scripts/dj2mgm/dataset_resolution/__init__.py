"""Datasets: files in config/datasets, the user's own folders and files, and known data of the hub."""
