"""Searches for near-duplicates by signatures of images, codes and vectors within a distance, and clusters."""
