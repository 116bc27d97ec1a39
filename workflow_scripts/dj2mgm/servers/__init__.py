"""Connections to servers, and the client of the Hugging Face hub."""
