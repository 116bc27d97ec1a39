"""MGM (Mini-Gemini): a language model with a CLIP tower and a high-resolution ConvNeXt tower.

Importing the package registers its classes, so that `AutoModelForImageTextToText.from_pretrained(folder)` finds them.
"""

from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration, MGMModel
from dj2mgm.models.mgm.processing_mgm import MGMProcessor

AutoConfig.register(MGMConfig.model_type, MGMConfig)
AutoModelForImageTextToText.register(MGMConfig, MGMForConditionalGeneration)
AutoProcessor.register(MGMConfig, MGMProcessor)

__all__ = ["MGMConfig", "MGMForConditionalGeneration", "MGMModel", "MGMProcessor"]
