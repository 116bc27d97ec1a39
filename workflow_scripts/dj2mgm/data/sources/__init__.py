"""Readers of dataset sources, one module per format; `read` takes a `Source` and yields pairs or conversations."""
