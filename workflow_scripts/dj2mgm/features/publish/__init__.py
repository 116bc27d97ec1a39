"""Trained models and their data in folders that others can load, with cards, and on the Hugging Face hub."""
