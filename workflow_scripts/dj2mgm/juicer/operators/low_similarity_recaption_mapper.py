"""A mapper that replaces captions whose CLIP similarity to their image is low, and a filter of unlikely new captions.

    process:
      - low_similarity_recaption_mapper:
          hf_clip: openai/clip-vit-base-patch32
          keep_fraction: 0.5
          captioner: {image_captioning_mapper: {hf_img2seq: Salesforce/blip2-opt-2.7b, keep_original_sample: false}}
      - batched_image_text_similarity_filter: {keep_fraction: 0.5}
      - caption_log_likelihood_filter: {min_log_likelihood: -3.0}

A row below the limit, or without a caption, gets the candidate that captioner and CLIP together find most likely. Later
filters decide whether it is good enough; they find its similarity and log-likelihood in the row's stats. Other rows do
not change.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from data_juicer.ops import load_ops
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE, Mapper
from data_juicer.utils.constant import Fields, StatsKeys
from data_juicer.utils.mm_utils import remove_special_tokens
from loguru import logger

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.score_limits import ORIGINAL_SIMILARITY
from dj2mgm.errors import InputError
from dj2mgm.recipes.catalogue import RECAPTION_OPERATOR as NAME

from .batched_image_text_similarity_filter import CLIP_DESCRIPTION, DEFAULT_CLIP
from .batched_image_text_similarity_filter import NAME as SIMILARITY_FILTER
from .captioners import (
    ENOUGH_TO_JUDGE,
    TOO_MANY_UNUSABLE,
    Captioner,
    StoredAnswersOperator,
    find_text_problem,
    format_reasons,
)
from .declarations import Captions, ShareLimits, ValueFilter, argument, merge_reports

LOG_LIKELIHOOD = "caption_log_likelihood"  # stat
RECAPTION_KEY = "recaption"  # key in a row's meta


@dataclass(frozen=True)
class Recaption:
    """The result for a row below the limit. Without a usable caption, `problem` has the reason and the row is kept."""

    original: str
    original_similarity: float
    caption: str | None = None
    similarity: float | None = None
    log_likelihood: float | None = None  # nats; None if the captioner reports none
    problem: str | None = None


LOGIT_SCALE = 100.0  # Data-Juicer's similarity is CLIP's logit over 100


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class LowSimilarityRecaptionMapper(StoredAnswersOperator, ShareLimits, Mapper):
    """A mapper that recaptions rows with one image whose image-text similarity under a CLIP is below a limit.

    It takes the usable candidate with the highest `log-likelihood + CLIP's logit`, which is the most likely candidate
    under the product of both models. If the captioner reports no log-likelihoods, it takes the most similar candidate.

    Stats: `image_text_similarity` of the current text, `original_image_text_similarity` of the original text, and
    `caption_log_likelihood`, which is empty if the captioner has not written the caption. Meta: `recaption`, the record
    of the replacement, for rows below the limit.
    """

    _accelerator = "cuda"
    _batched_op = True
    limit = "min_similarity"
    report_key = RECAPTION_KEY

    hf_clip: str = argument(DEFAULT_CLIP, CLIP_DESCRIPTION)
    min_similarity: float | None = argument(None, "rows below it are recaptioned")
    # rows that tie with the last of these rows keep their caption too
    keep_fraction: float | None = argument(None, "share of rows, most similar first, that keep their caption instead")
    captioner: dict | None = argument(None, "the operator that writes captions, {operator: {argument: value}}")
    max_caption_length: int = argument(500, "captions with more characters are not used")
    seed: int = argument(0, "seed of a captioner that draws at random")
    batch_size: int = argument(128, "rows scored together. The captioner has its own batch size")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._captioner = Captioner(self.captioner, self.seed, self.captions_folder, self.writer)
        settings = {"hf_clip": self.hf_clip, "batch_size": self.batch_size, "accelerator": self.accelerator}
        [self.similarity] = load_ops([{SIMILARITY_FILTER: settings}])
        self.batch_size = DEFAULT_BATCH_SIZE  # large, to fill the captioner's batches

    def measure(self, samples: dict, rank: int | None = None) -> dict:
        """Return the samples with their similarities, scored in batches of the similarity filter."""
        size = self.similarity.batch_size
        for start in range(0, len(samples[self.text_key]), size):
            part = {key: values[start : start + size] for key, values in samples.items()}
            samples[Fields.stats][start : start + size] = self.similarity.compute_stats(part, rank=rank)[Fields.stats]
        return samples

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        """Return the score of a text with exactly one chunk that has images, and no score of other texts."""
        scores = stats[StatsKeys.image_text_similarity]
        return [float(scores[0])] if len(scores) == 1 else []

    def process_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Score the rows, and recaption those below `min_similarity`; `report` counts the captions."""
        samples = self.measure(samples, rank)
        low = [row for row in range(len(samples[self.text_key])) if self._is_low(samples, row)]
        images = [samples[self.image_key][row][0] for row in low]
        captions, new_count = self._captioner.caption(images)
        problems = [
            [answer.problem or find_text_problem(text, self.max_caption_length) for text in answer.candidates]
            for answer in captions
        ]
        pairs = [
            (text, image)
            for answer, answer_problems, image in zip(captions, problems, images, strict=True)
            for text, problem in zip(answer.candidates, answer_problems, strict=True)
            if not problem
        ]
        similarities = iter(self._compute_similarities(pairs))
        rows = zip(low, captions, problems, strict=True)
        records = {row: self._make_record(samples, row, *found, similarities) for row, *found in rows}
        self._count(new_count, captions, list(records.values()))
        for row, (stats, meta) in enumerate(zip(samples[Fields.stats], samples[Fields.meta], strict=True)):
            record = records.get(row)
            stats[LOG_LIKELIHOOD] = []
            stats[ORIGINAL_SIMILARITY] = list(stats[StatsKeys.image_text_similarity])
            if record and record.caption is not None:
                samples[self.text_key][row] = build_dj_text(record.caption)
                stats[StatsKeys.image_text_similarity] = [record.similarity]
                if record.log_likelihood is not None:
                    stats[LOG_LIKELIHOOD] = [record.log_likelihood]
            meta[RECAPTION_KEY] = asdict(record) if record else None
        return samples

    def finish_report(self, report: dict) -> dict:
        """Return the complete counts of all rows, even if they are 0, and warn if many images got no usable caption.

        Raises:
            InputError: no caption of five or more images can be used.
        """
        complete = {key: report.get(key, 0) for key in ("below", "captioned", "cached")}
        complete["unusable"] = dict(sorted(report.get("unusable", {}).items()))
        complete |= {"min_similarity": self.min_similarity} | {key: report[key] for key in ("server",) if key in report}
        below, unusable = complete["below"], sum(complete["unusable"].values())
        if unusable <= TOO_MANY_UNUSABLE * below:
            return complete
        problem = (
            f"captioner {self._captioner.name}: {unusable} of {below} images got no usable caption "
            f"({format_reasons(complete['unusable'])})"
        )
        if report["example"]:
            problem += f", such as {report['example'][:60]!r}"
        if unusable == below >= ENOUGH_TO_JUDGE:
            check = (
                "Read the server's answers above, and check that its model takes images"
                if "server" in complete
                else "Check that the captioner is trained and fits its processor, or name another one in the recipe"
            )
            raise InputError(f"{problem}. {check} (max_caption_length allows {self.max_caption_length} characters)")
        logger.warning(problem)
        return complete

    def _is_low(self, samples: dict, row: int) -> bool:
        images, scores = samples[self.image_key][row], self.read_scores(samples[Fields.stats][row])
        has_caption = remove_special_tokens(samples[self.text_key][row]).strip() != ""
        return len(images or ()) == 1 and bool(scores) and (scores[0] < self.min_similarity or not has_caption)

    def _make_record(
        self, samples: dict, row: int, captions: Captions, problems: list[str | None], similarities: Iterator[float]
    ) -> Recaption:
        """Return the record of the best usable caption for a row; `similarities` go on with its usable captions."""
        original = remove_special_tokens(samples[self.text_key][row])
        [score] = self.read_scores(samples[Fields.stats][row])
        values = {index: next(similarities) for index, problem in enumerate(problems) if not problem}
        if not values:
            return Recaption(original, score, problem=problems[0])
        likelihoods = captions.log_likelihoods or [0.0] * len(problems)
        best = max(values, key=lambda index: LOGIT_SCALE * values[index] + likelihoods[index])
        likelihood = captions.log_likelihoods and captions.log_likelihoods[best]
        return Recaption(original, score, captions.candidates[best], values[best], likelihood)

    def _compute_similarities(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Return the CLIP similarity of each (caption, image), as Data-Juicer's filter defines it."""
        similarities = []
        size = 4 * self.similarity.batch_size  # an image has several captions and is encoded once
        for start in range(0, len(pairs), size):
            texts, images = zip(*pairs[start : start + size], strict=True)
            samples = {
                self.text_key: [build_dj_text(text) for text in texts],
                self.image_key: [[image] for image in images],
                Fields.stats: [{} for _ in texts],
            }
            scored = self.similarity.compute_stats(samples)[Fields.stats]
            similarities += [score for stats in scored for score in self.read_scores(stats)]
        return similarities

    def _count(self, new_count: int, captions: list[Captions], records: list[Recaption]) -> None:
        problems = Counter(record.problem for record in records if record.problem)
        texts = (text for answer in captions for text in answer.candidates)
        counts = {"below": len(records), "captioned": new_count, "cached": len(records) - new_count}
        counts |= self._take_server_counts()
        example = next((text for text in texts if find_text_problem(text, self.max_caption_length)), "")
        self.report = merge_reports(self.report, counts | {"unusable": problems, "example": example})


@OPERATORS.register_module("caption_log_likelihood_filter")
class CaptionLogLikelihoodFilter(ValueFilter):
    """A filter that keeps rows whose caption has at least a given log-likelihood, and rows without one.

    The stat `caption_log_likelihood` holds one number in nats, for the whole caption. It is empty if no captioner has
    written the caption, or if the captioner reports no log-likelihood.
    """

    _batched_op = True
    stat = LOG_LIKELIHOOD
    bounds = ("min_log_likelihood", None)

    min_log_likelihood: float = argument(-3.0, "lowest log-likelihood to keep, in nats")

    def compute_stats_batched(self, samples: dict) -> dict:
        for stats in samples[Fields.stats]:
            value = stats.get(LOG_LIKELIHOOD)
            stats[LOG_LIKELIHOOD] = np.array([] if value is None else value, dtype=np.float64)
        return samples
