"""Writing captions anew where they do not fit their image."""

from .low_similarity_recaption_mapper import LowSimilarityRecaptionMapper
from .mgm_captioning_mapper import MGMCaptioningMapper

__all__ = ["LowSimilarityRecaptionMapper", "MGMCaptioningMapper"]
