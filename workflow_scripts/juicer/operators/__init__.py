"""This workflow's own operators, registered in Data-Juicer's registry on import.

They work in a plain Data-Juicer run too (which needs Ray installed), with the workflow's library on the path:

    PYTHONPATH=workflow_scripts dj-process --config recipe.yaml \
        --custom-operator-paths workflow_scripts/juicer/operators
"""

from .batched_image_text_similarity_filter import BatchedImageTextSimilarityFilter
from .caption_log_likelihood_filter import CaptionLogLikelihoodFilter
from .image_integrity_filter import ImageIntegrityFilter
from .image_text_deduplicator import ImageTextDeduplicator
from .recaptioning import LowSimilarityRecaptionMapper, MGMCaptioningMapper

__all__ = [
    "BatchedImageTextSimilarityFilter",
    "CaptionLogLikelihoodFilter",
    "ImageIntegrityFilter",
    "ImageTextDeduplicator",
    "LowSimilarityRecaptionMapper",
    "MGMCaptioningMapper",
]
