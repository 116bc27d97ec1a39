"""Finished runs as RO-Crates: written, read, checked and reproduced."""
