"""The best mixtures by merged LoRAs, on the page of a study that merges them."""

from dj2mgm.records.mixture_records import MixtureScores, ScoredMixture
from dj2mgm.reporting.comparison import find_title, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.study.proxies import measure_agreement, read_full_scores, select_merged_scores
from dj2mgm.reporting.variants_page import PlainTable
from dj2mgm.reporting.verdicts.headline_scores import HeadlineScore

MAX_MIXTURES = 10  # rows of the table


def build_mixture_table(
    experiments: list[ExperimentResults], headline: HeadlineScore, merged: MixtureScores | None
) -> list[PlainTable]:
    """Return the best mixtures by merged models.

    The list is empty unless merged and trained models put enough pairs in the same order.
    """
    truth = read_full_scores(experiments, headline)
    agreement = measure_agreement(select_merged_scores(merged), truth) if merged else None
    if agreement is None or agreement.use != "used":
        return []
    best = sorted(merged.mixtures, key=lambda mixture: -mixture.score)[:MAX_MIXTURES]
    note = (
        f"Stage 2 was trained on each of the {merged.sources} sources alone. For {len(merged.mixtures)} mixtures, "
        "the LoRAs of the sources were merged with the shares as weights, and the model answered the held-out "
        f"questions. Merged and trained models agree on {agreement.right} of {agreement.pairs} pairs of mixtures, so "
        "the order can be used. The best of many scores is too high by chance. Train these mixtures to measure them."
    )
    heads = [
        "Shares",
        "Probability of the right answer, merged",
        f"{find_title(headline.title)}, trained",
    ]
    return [
        PlainTable(
            "Best mixtures by merged LoRAs", note, heads, [_build_row(mixture, headline, truth) for mixture in best]
        )
    ]


def _build_row(mixture: ScoredMixture, headline: HeadlineScore, truth: dict[str, float]) -> list[str]:
    shares = ", ".join(f"{source} {100 * share:.3g} %" for source, share in mixture.shares.items())
    trained = truth.get(mixture.variant or "")
    return [
        shares,
        format_score("answer_probability", mixture.score),
        "–" if trained is None else format_score(headline.metric, trained),
    ]
