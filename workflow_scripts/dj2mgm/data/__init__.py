"""Rows, images and file formats of the workflow."""
