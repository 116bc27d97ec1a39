"""Generated documents: config/config.yaml, JSON schemas, and tables of docs/."""
