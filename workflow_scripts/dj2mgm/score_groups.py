"""Names of the groups of scores: a model and its images, as `finetune/own`, or a control."""

FINETUNED = "finetune"
PRETRAINED = "pretrain"
UNTRAINED = "base"

OWN = "own"  # each row with its own image
SHUFFLED = "shuffled"  # control: each row with the image of another row
NO_IMAGE = "none"  # control: no row with an image
DIFFERENCE = "difference"  # own − shuffled images, paired

REFERENCE_CAPTIONS = "reference"  # control that repeats the reference captions; it has no shuffled images


def name_group(model: str, images: str) -> str:
    return f"{model}/{images}"


def split_group(group: str) -> tuple[str, str]:
    """Return the model and the images of a group; a control without a model has no images."""
    model, _, images = group.partition("/")
    return model, images


OWN_GROUP = name_group(FINETUNED, OWN)
GAIN_GROUP = name_group(FINETUNED, DIFFERENCE)  # gain of the fine-tuned model from its own images
