"""Names and labels of the statistics of each filter, and names of the arguments that limit them.

Values of the limits are in juicer/filter_limits.py.
"""

from collections.abc import Collection
from functools import cache

from dj2mgm.recipes.catalogue import list_arguments

LIMIT_PREFIXES = {"min": "min_", "max": "max_"}  # names of arguments for the ends of a range begin with these
OPERATOR_STATISTICS = {  # by operator
    "text_length_filter": ("text_len",),
    "words_num_filter": ("num_words",),
    "token_num_filter": ("num_token",),
    "alphanumeric_filter": ("alnum_ratio",),
    "special_characters_filter": ("special_char_ratio",),
    "word_repetition_filter": ("word_rep_ratio",),
    "character_repetition_filter": ("char_rep_ratio",),
    "average_line_length_filter": ("avg_line_length",),
    "maximum_line_length_filter": ("max_line_length",),
    "stopwords_filter": ("stopwords_ratio",),
    "flagged_words_filter": ("flagged_words_ratio",),
    "language_id_score_filter": ("lang_score",),
    "perplexity_filter": ("perplexity",),
    "text_action_filter": ("num_action",),
    "image_shape_filter": ("image_width", "image_height"),
    "image_aspect_ratio_filter": ("aspect_ratios",),
    "image_size_filter": ("image_sizes",),
    "image_face_ratio_filter": ("face_ratios",),
    "image_face_count_filter": ("face_counts",),
    "image_aesthetics_filter": ("image_aesthetics_scores",),
    "image_nsfw_filter": ("image_nsfw_score",),
    "image_text_similarity_filter": ("image_text_similarity",),
    "image_text_matching_filter": ("image_text_matching_score",),
    "phrase_grounding_recall_filter": ("phrase_grounding_recall",),
    "caption_log_likelihood_filter": ("caption_log_likelihood",),
    "likelihood_gain_filter": ("likelihood_gain",),
    "vlm_rating_filter": (
        "rating_relevance",
        "rating_visual_dependency",
        "rating_formatting",
        "rating_image_correspondence",
    ),
    "caption_agreement_filter": ("caption_agreement",),
    "blind_answer_filter": ("blind_likelihood",),
    "round_trip_filter": ("round_trip_agreement",),
}
STATISTIC_LABELS = {  # with units, for pages; other statistics are shown by name
    "text_len": "text length (characters)",
    "num_words": "number of words",
    "num_token": "number of tokens",
    "alnum_ratio": "letters and digits (share of characters)",
    "special_char_ratio": "special characters (share of characters)",
    "word_rep_ratio": "repeated word sequences (share)",
    "char_rep_ratio": "repeated character sequences (share)",
    "avg_line_length": "mean line length (characters)",
    "max_line_length": "longest line (characters)",
    "stopwords_ratio": "stop words (share of words)",
    "flagged_words_ratio": "flagged words (share of words)",
    "lang_score": "certainty of the language (0 to 1)",
    "num_action": "number of verbs",
    "image_width": "image width (px)",
    "image_height": "image height (px)",
    "aspect_ratios": "image width / height",
    "image_sizes": "size of the image's file (bytes)",
    "face_ratios": "largest face (share of the image)",
    "face_counts": "number of faces",
    "image_aesthetics_scores": "aesthetics score (0 to 1)",
    "image_nsfw_score": "unsafe content (probability)",
    "image_text_similarity": "CLIP similarity of image and text",
    "image_text_matching_score": "image and text match (probability)",
    "phrase_grounding_recall": "phrases found in the image (share)",
    "caption_log_likelihood": "log-likelihood of the caption (nats per token)",
    "likelihood_gain": "gain in log-likelihood by the image (nats per token)",
    "rating_relevance": "rating of relevance (1 to 5)",
    "rating_visual_dependency": "rating of visual dependency (1 to 5)",
    "rating_formatting": "rating of formatting (1 to 5)",
    "rating_image_correspondence": "rating of image correspondence (1 to 5)",
    "caption_agreement": "agreement with the caption (0 or 1)",
    "blind_likelihood": "likelihood of the answer without the image (probability)",
    "round_trip_agreement": "agreement with another answer (probability)",
}


def label_statistic(name: str) -> str:
    """Return the plain label of a statistic, with its unit."""
    return STATISTIC_LABELS.get(name, name.replace("_", " "))


def find_limit_arguments(arguments: Collection[str], statistic: str, alone: bool) -> dict[str, str]:
    """Return the names of the arguments that limit a statistic, by side.

    It is empty if the operator has no such arguments.

    Args:
        arguments: names of the operator's arguments.
        statistic: name of one of its statistics.
        alone: whether the operator has no other statistic. Otherwise the name of an argument without its prefix is
            part of the statistic's name (min_width, image_width).
    """
    ranges = {
        name[len(prefix) :] for name in arguments for prefix in LIMIT_PREFIXES.values() if name.startswith(prefix)
    }
    words = ranges if alone and len(ranges) == 1 else {word for word in ranges if word in statistic}
    if len(words) != 1:
        return {}
    [word] = words
    return {side: prefix + word for side, prefix in LIMIT_PREFIXES.items() if prefix + word in arguments}


@cache
def read_statistic_operators() -> dict[str, tuple[str, dict[str, str]]]:
    """Return the operator of each statistic of `OPERATOR_STATISTICS`, and the arguments that limit it by side."""
    limits = {
        statistic: (operator, find_limit_arguments(list_arguments(operator), statistic, len(statistics) == 1))
        for operator, statistics in OPERATOR_STATISTICS.items()
        for statistic in statistics
    }
    return limits | {"image_watermark_prob": ("image_watermark_filter", {"max": "prob_threshold"})}  # without a prefix
