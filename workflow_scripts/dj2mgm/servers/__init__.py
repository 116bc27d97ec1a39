"""Clients of other machines: models on servers with OpenAI's chat completions, and the Hugging Face hub."""
