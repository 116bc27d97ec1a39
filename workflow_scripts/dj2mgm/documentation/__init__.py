"""Generated documents: config/config.yaml, JSON schemas for editors, and tables of docs/."""
