"""Rows, images, file formats, held-out images, chat templates."""
