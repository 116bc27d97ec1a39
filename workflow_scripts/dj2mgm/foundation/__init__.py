"""Tiny CLIP, ConvNeXt and language model of the embedded default."""
