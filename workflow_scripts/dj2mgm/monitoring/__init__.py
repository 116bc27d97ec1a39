"""Memory in use, sampled while a stage runs."""
