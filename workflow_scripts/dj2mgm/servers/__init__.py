"""Client of models on servers with OpenAI's chat completions."""
