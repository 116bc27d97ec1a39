"""Models on servers with OpenAI's chat completions: a captioner of recipes, and the check of a served model."""
