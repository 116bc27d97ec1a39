"""A mapper that replaces captions whose CLIP similarity to their image is low.

    process:
      - low_similarity_recaption_mapper:
          hf_clip: openai/clip-vit-base-patch32
          keep_fraction: 0.5
          captioner: {image_captioning_mapper: {hf_img2seq: Salesforce/blip2-opt-2.7b, keep_original_sample: false}}
      - batched_image_text_similarity_filter: {keep_fraction: 0.5}

A row below the limit, or without a caption, gets the candidate that captioner and CLIP together find most likely. Later
filters decide whether it is good enough; they find its similarity and log-likelihood in the row's stats. Other rows do
not change.
"""

from collections import Counter
from dataclasses import asdict, dataclass

from data_juicer.ops import load_ops
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE
from data_juicer.utils.constant import Fields, StatsKeys
from data_juicer.utils.mm_utils import remove_special_tokens
from loguru import logger

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.score_limits import ORIGINAL_SIMILARITY
from dj2mgm.errors import InputError
from dj2mgm.recipes.recipe_step import RECAPTION_OPERATOR as NAME

from .batched_image_text_similarity_filter import NAME as SIMILARITY_FILTER
from .caption_log_likelihood_filter import STAT as LOG_LIKELIHOOD
from .captioners import ENOUGH_TO_JUDGE, TOO_MANY_UNUSABLE, Captioner, StoredAnswersOperator, find_text_problem
from .declarations import Captions, ShareMapper, check_fraction, merge_reports

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


def complete_report(counts: dict, min_similarity: float) -> dict:
    """Return the report on rows below the limit, with every count even if it is 0.

    It counts rows captioned now, rows captioned in earlier runs, rows without a usable caption by reason, and the cost
    of a captioner on a server.
    """
    report = {key: counts.get(key, 0) for key in ("below", "captioned", "cached")}
    unusable = dict(sorted(counts.get("unusable", {}).items()))
    server = {key: counts[key] for key in ("server",) if key in counts}
    return report | {"unusable": unusable, "min_similarity": min_similarity} | server


def judge_captioner(name: str, report: dict, example: str, max_caption_length: int) -> None:
    """Warn of a captioner whose captions often cannot be used, or refuse one if no caption of five or more images can.

    `report` is the result of `complete_report`, `example` one of the captions that cannot be used.
    """
    unusable = sum(report["unusable"].values())
    if unusable <= TOO_MANY_UNUSABLE * report["below"]:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["unusable"].items())
    problem = f"captioner {name}: {unusable} of {report['below']} images got no usable caption ({reasons})"
    if example:
        problem += f", such as {example[:60]!r}"
    if unusable == report["below"] >= ENOUGH_TO_JUDGE:
        check = (
            "Read the server's answers above, and check that its model takes images"
            if "server" in report
            else "Check that the captioner is trained and fits its processor, or name another one in the recipe"
        )
        raise InputError(f"{problem}. {check} (max_caption_length allows {max_caption_length} characters)")
    logger.warning(problem)


LOGIT_SCALE = 100.0  # Data-Juicer's similarity is CLIP's logit over 100


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class LowSimilarityRecaptionMapper(StoredAnswersOperator, ShareMapper):
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

    def __init__(
        self,
        hf_clip: str = "openai/clip-vit-base-patch32",
        min_similarity: float | None = None,
        keep_fraction: float | None = None,
        captioner: dict | None = None,
        max_caption_length: int = 500,
        seed: int = 0,
        captions_folder: str | None = None,
        writer: str = "captions",
        batch_size: int = 128,
        *args,
        **kwargs,
    ):
        """Initialize the operator.

        Args:
            hf_clip: folder or hub id of a CLIP with safetensors weights.
            min_similarity: rows below it are recaptioned.
            keep_fraction: share of the rows, most similar first, that keep their caption, in place of `min_similarity`.
                Rows that tie with the last of these rows keep their caption too.
            captioner: the operator that writes captions, as in a recipe: {operator: {argument: value}}.
            max_caption_length: captions with more characters are not used.
            seed: seed of a captioner that draws at random.
            captions_folder: folder in which captions are kept for other runs (None: they are not kept).
            writer: name of this run's file in that folder. Runs at the same time need different names.
            batch_size: rows scored together. The captioner has its own batch size.
        """
        super().__init__(*args, batch_size=DEFAULT_BATCH_SIZE, **kwargs)  # large, to fill the captioner's batches
        if (min_similarity is None) == (keep_fraction is None):
            raise ValueError("exactly one of min_similarity and keep_fraction must be given")
        check_fraction(keep_fraction)
        self.min_similarity = min_similarity
        self.keep_fraction = keep_fraction
        self.max_caption_length = max_caption_length
        self._captioner = Captioner(captioner, seed, captions_folder, writer)
        settings = {"hf_clip": hf_clip, "batch_size": batch_size, "accelerator": self.accelerator}
        [self.similarity] = load_ops([{SIMILARITY_FILTER: settings}])
        self.report: dict = {}

    def measure(self, samples: dict, rank: int | None = None) -> dict:
        """Return the samples with their similarities, scored in batches of the similarity filter."""
        samples = dict(samples)
        if Fields.stats not in samples:
            samples[Fields.stats] = [{} for _ in samples[self.text_key]]
        size = self.similarity.batch_size
        for start in range(0, len(samples[self.text_key]), size):
            part = {key: values[start : start + size] for key, values in samples.items()}
            samples[Fields.stats][start : start + size] = self.similarity.compute_stats(part, rank=rank)[Fields.stats]
        return samples

    def process_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Score the rows, and recaption those below `min_similarity`; `report` counts the captions."""
        return self._recaption(self.measure(samples, rank))

    def finish_report(self, report: dict) -> dict:
        """Return the complete counts of all rows, unless no caption of any row can be used."""
        complete = complete_report(report, self.min_similarity)
        judge_captioner(self._captioner.name, complete, report.get("example", ""), self.max_caption_length)
        return complete

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        score = _get_only_score(stats[StatsKeys.image_text_similarity])
        return [] if score is None else [score]

    def _recaption(self, samples: dict) -> dict:
        samples = dict(samples)
        low = [row for row in range(len(samples[self.text_key])) if self._is_low(samples, row)]
        images = [samples[self.image_key][row][0] for row in low]
        captions, new_count = self._captioner.caption(images)
        originals = [
            (remove_special_tokens(samples[self.text_key][row]), self.read_scores(samples[Fields.stats][row])[0])
            for row in low
        ]
        records = self._choose_captions(originals, images, captions)
        self._add_to_report(new_count, captions, records)
        return self._replace(samples, dict(zip(low, records, strict=True)))

    def _is_low(self, samples: dict, row: int) -> bool:
        images, scores = samples[self.image_key][row], self.read_scores(samples[Fields.stats][row])
        has_caption = remove_special_tokens(samples[self.text_key][row]).strip() != ""
        return len(images or ()) == 1 and bool(scores) and (scores[0] < self.min_similarity or not has_caption)

    def _choose_captions(
        self, originals: list[tuple[str, float]], images: list[str], captions: list[Captions]
    ) -> list[Recaption]:
        """Return the record of the best usable caption for each row, whose original is (caption, similarity)."""
        problems = [
            [
                image_captions.problem or find_text_problem(text, self.max_caption_length)
                for text in image_captions.candidates
            ]
            for image_captions in captions
        ]
        pairs = [
            (text, image)
            for image_captions, image_problems, image in zip(captions, problems, images, strict=True)
            for text, problem in zip(image_captions.candidates, image_problems, strict=True)
            if not problem
        ]
        similarities = iter(self._compute_similarities(pairs))
        records = []
        for (original, score), image_captions, image_problems in zip(originals, captions, problems, strict=True):
            usable = [index for index, problem in enumerate(image_problems) if not problem]
            if not usable:
                records.append(Recaption(original, score, problem=image_problems[0]))
                continue
            values = {index: next(similarities) for index in usable}
            likelihoods = image_captions.log_likelihoods or [0.0] * len(image_problems)
            best = max(usable, key=lambda index: LOGIT_SCALE * values[index] + likelihoods[index])
            likelihood = image_captions.log_likelihoods and image_captions.log_likelihoods[best]
            records.append(Recaption(original, score, image_captions.candidates[best], values[best], likelihood))
        return records

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
            similarities += [_get_only_score(stats[StatsKeys.image_text_similarity]) for stats in scored]
        return similarities

    def _add_to_report(self, new_count: int, captions: list[Captions], records: list[Recaption]) -> None:
        problems = Counter(record.problem for record in records if record.problem)
        texts = (text for image_captions in captions for text in image_captions.candidates)
        counts = {"below": len(records), "captioned": new_count, "cached": len(records) - new_count}
        counts |= self._take_server_counts()
        example = next((text for text in texts if find_text_problem(text, self.max_caption_length)), "")
        self.report = merge_reports(self.report, counts | {"unusable": problems, "example": example})

    def _replace(self, samples: dict, records: dict[int, Recaption]) -> dict:
        """Return the samples with the captions and stats of `records`, which are by row."""
        metas = samples.get(Fields.meta) or [{} for _ in samples[self.text_key]]
        samples[Fields.meta] = metas = list(metas)
        samples[self.text_key] = list(samples[self.text_key])
        for row, stats in enumerate(samples[Fields.stats]):
            record = records.get(row)
            stats[LOG_LIKELIHOOD] = []
            stats[ORIGINAL_SIMILARITY] = list(stats[StatsKeys.image_text_similarity])
            if record and record.caption is not None:
                samples[self.text_key][row] = build_dj_text(record.caption)
                stats[StatsKeys.image_text_similarity] = [record.similarity]
                if record.log_likelihood is not None:
                    stats[LOG_LIKELIHOOD] = [record.log_likelihood]
            metas[row] = dict(metas[row] or {}) | {RECAPTION_KEY: asdict(record) if record else None}
        return samples


def _get_only_score(scores: list[float]) -> float | None:
    """Return the score of a text with exactly one chunk that has images; None for other texts."""
    return float(scores[0]) if len(scores) == 1 else None
