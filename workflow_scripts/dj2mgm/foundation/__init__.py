"""Tiny CLIP, ConvNeXt and language model of the embedded default, trained on clean scenes."""
