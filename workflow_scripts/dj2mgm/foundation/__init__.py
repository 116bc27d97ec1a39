"""Tiny foundation models, trained on clean scenes, in place of CLIP, ConvNeXt and Gemma."""
