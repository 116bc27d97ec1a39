"""Clients of model servers and of the Hugging Face hub."""
