"""Writes finished runs as RO-Crates, and reads, checks and reproduces crates."""
