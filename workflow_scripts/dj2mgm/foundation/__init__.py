"""Tiny foundation models, trained on clean scenes, that stand where CLIP, ConvNeXt and Gemma stand in a real run."""
