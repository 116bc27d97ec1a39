"""Weights from and to the software that MGM was published with: names, shards, whole checkpoints.

Nothing here computes with weights: a tensor keeps its dtype and its bytes, and only its name changes.
"""
