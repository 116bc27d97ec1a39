"""Conversion of weights from and to the published MGM code.

Tensors keep their dtype and their bytes; only their names change.
"""
