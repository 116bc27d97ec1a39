"""Cheap proxies for full trainings, and how often each orders two variants as their full trainings do.

A proxy is used only if the 95 % interval of this share lies above `MIN_ORDERED`. Pairs share variants, so they are not
independent. The interval is that of Clopper and Pearson (1934) for the effective number of pairs, share · (1 − share) /
variance (Korn and Graubard 1998, Survey Methodology 24, 193). The variance is a jackknife that leaves out one variant
with all its pairs at a time. The effective number is at least that of disjoint pairs (Hoeffding 1963, JASA 58, 13,
section 5).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from dj2mgm.evaluation.intervals import LEVEL
from dj2mgm.features.studies.study_records import MixtureScores, ScoredMixture, ShownSearch
from dj2mgm.features.studies.study_table import PlainTable
from dj2mgm.features.studies.trial_scores import find_trial_score, read_mean
from dj2mgm.reporting.comparison import SCORE_TITLES, HeadlineScore, find_obstacle, find_title, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.score_groups import OWN_GROUP
from dj2mgm.storage.files import read_jsonl

MIN_ORDERED = 0.75  # share of pairs that a proxy must order rightly
MIN_VARIANTS = 3  # variants of a table; two have one pair
# statistics of rows whose mean may promise a higher score
STATISTICS = {
    "image_text_similarity": "similarity",
    "likelihood_gain": "likelihood gain",
    "rating_relevance": "rating of relevance",
    "rating_visual_dependency": "rating of visual dependency",
    "rating_formatting": "rating of formatting",
    "rating_image_correspondence": "rating of image correspondence",
}


@dataclass(frozen=True)
class Proxy:
    """Something cheaper than a full training.

    Attributes:
        title: name of the proxy.
        cost: cost of the proxy, in words.
        values: value of each variant; higher values promise higher scores.
        truth: scores of full trainings that it predicts; None for the headline.
    """

    title: str
    cost: str
    values: Mapping[str, float]
    truth: Mapping[str, float] | None = None


@dataclass(frozen=True)
class ProxyAgreement:
    """The pairs of variants that a proxy orders as their full trainings do."""

    right: int
    pairs: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.right / self.pairs

    @property
    def use(self) -> str:
        """Decision on the use of the proxy, with its reason."""
        if self.low >= MIN_ORDERED:
            return "used"
        return "not used" if self.share < MIN_ORDERED else "not used: too few pairs"


def measure_agreement(proxy: Mapping[str, float], truth: Mapping[str, float]) -> ProxyAgreement | None:
    """Return the agreement of a proxy from the variants that have both scores; None without a pair.

    Pairs with equal true scores have no order, and are left out. A proxy that is equal for both does not order them.
    """
    names = [name for name in truth if name in proxy]
    true_values, proxy_values = (np.array([scores[name] for name in names], dtype=float) for scores in (truth, proxy))
    true_order, proxy_order = (np.sign(np.subtract.outer(values, values)) for values in (true_values, proxy_values))
    counted = true_order != 0  # (variants, variants), each pair twice
    right = counted & (true_order == proxy_order)
    if not counted.any():
        return None
    pairs, right_pairs = int(counted.sum()) // 2, int(right.sum()) // 2
    effective_pairs = _count_effective_pairs(counted.sum(axis=1), right.sum(axis=1))
    low, high = _compute_exact_interval(right_pairs / pairs, effective_pairs)
    return ProxyAgreement(right_pairs, pairs, low, high)


def _count_effective_pairs(pairs: np.ndarray, right: np.ndarray) -> float:
    """Return the number of independent pairs that show the share of right pairs as well as these pairs do.

    Args:
        pairs: (variants,) number of each variant's pairs.
        right: (variants,) number of these pairs in the right order.
    """
    total, disjoint = pairs.sum() / 2, max(1, np.count_nonzero(pairs) // 2)
    share, others = right.sum() / 2 / total, total - pairs
    if not 0 < share < 1:
        return float(total)
    if not others.all():  # all pairs have one variant in common
        return float(disjoint)
    shares = (right.sum() / 2 - right) / others
    variance = (len(pairs) - 1) * np.var(shares)
    return float(np.clip(share * (1 - share) / max(variance, 1e-12), disjoint, total))


def _compute_exact_interval(share: float, number: float) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson for a share of a number, which need not be whole."""
    right, wrong = share * number, (1 - share) * number
    low = float(betaincinv(right, wrong + 1, LEVEL / 2)) if right else 0.0
    return low, float(betaincinv(right + 1, wrong, 1 - LEVEL / 2)) if wrong else 1.0


def build_proxy_table(
    experiments: list[ExperimentResults],
    headline: HeadlineScore,
    search: ShownSearch | None,
    merged: MixtureScores | None = None,
) -> list[PlainTable]:
    """Return the table of all proxies that the variants have; no table for fewer than three variants.

    Args:
        experiments: the variants and controls.
        headline: the score after full trainings.
        search: the search, as its page shows it; None for another design.
        merged: scores of merged models; None if the study merges none.
    """
    variants = list_variants(experiments)
    truth = read_full_scores(experiments, headline)
    if len(truth) < MIN_VARIANTS:
        return []
    rows = []
    for proxy in [*_list_merged(merged), *_list_proxies(variants, headline, search)]:
        if len(proxy.values) < MIN_VARIANTS:
            continue
        if agreement := measure_agreement(proxy.values, truth if proxy.truth is None else proxy.truth):
            interval = f"{100 * agreement.low:.0f} to {100 * agreement.high:.0f} %"
            rows.append(
                [
                    proxy.title,
                    proxy.cost,
                    f"{agreement.right} of {agreement.pairs}",
                    f"{100 * agreement.share:.0f} %",
                    interval,
                    agreement.use,
                ]
            )
    note = (
        f"The table states how many pairs of variants each proxy puts in the same order as the {headline.title} after "
        "full training, with a 95 % interval of their share, which allows for variants that pairs have in "
        f"common. A proxy is used only if the interval is above {100 * MIN_ORDERED:.0f} %. Variants "
        "without a full training are excluded."
    )
    heads = ["Proxy", "Cost", "Pairs in the right order", "Share", "95 % interval", "Verdict"]
    return [PlainTable("Cheap proxies", note, heads, rows)] if rows else []


def list_variants(experiments: list[ExperimentResults]) -> list[ExperimentResults]:
    """Return the experiments that are no controls."""
    return [experiment for experiment in experiments if experiment.control is None]


def read_full_scores(experiments: list[ExperimentResults], headline: HeadlineScore) -> dict[str, float]:
    """Return the headline of each fully trained variant by its name, without controls."""
    variants = list_variants(experiments)
    scores = {variant.name: read_mean(variant, headline.group, headline.metric) for variant in variants}
    return {name: score for name, score in scores.items() if score is not None}


def select_merged_scores(merged: MixtureScores) -> dict[str, float]:
    """Return the score of the merged model of each trained mixture, by the name of its variant."""
    return {mixture.variant: mixture.score for mixture in merged.mixtures if mixture.variant is not None}


def _list_merged(merged: MixtureScores | None) -> Iterator[Proxy]:
    if merged:
        cost = f"{merged.sources} trainings for all"
        yield Proxy("merged LoRAs of the single sources", cost, select_merged_scores(merged))


def _list_proxies(
    variants: list[ExperimentResults], headline: HeadlineScore, search: ShownSearch | None
) -> Iterator[Proxy]:
    """Yield the proxies that the runs have measured."""
    if search:
        last_scores = {trial.name: trial.scores[-1] for trial in search.trials if trial.scores[-1] is not None}
        for index, rung in enumerate(search.rungs[:-1]):
            scores = {trial.name: trial.scores[index] for trial in search.trials if trial.scores[index] is not None}
            title = f"{find_trial_score(variants, search.goals, rung).title} after a short training"
            yield Proxy(title, f"{100 * rung:g} % of the rows", scores, last_scores if search.goals else None)
    steps = [run.checkpoint_scores["finetune"] for variant in variants for run in variant.runs]
    if steps and all(len(rows) > 1 for rows in steps):
        fraction = max(rows[0]["step"] / rows[-1]["step"] for rows in steps)
        values = {
            variant.name: -float(np.mean([run.checkpoint_scores["finetune"][0]["loss"] for run in variant.runs]))
            for variant in variants
        }
        title = "loss on held-out answers at the first checkpoint"
        yield Proxy(title, f"{100 * fraction:.0f} % of stage 2", values)
    for metric, title in SCORE_TITLES.items():
        if metric != headline.metric and not find_obstacle(metric, *variants):
            scores = {variant.name: read_mean(variant, OWN_GROUP, metric) for variant in variants}
            yield Proxy(title, "whole run", {name: score for name, score in scores.items() if score is not None})
    kept_shares = {variant.name: _compute_retained_share(variant) for variant in variants}
    yield Proxy("share of rows that the recipes keep", "no training", kept_shares)
    means = {variant.name: _average_statistics(variant) for variant in variants}
    for statistic, title in STATISTICS.items():
        statistic_means = {name: values[statistic] for name, values in means.items() if statistic in values}
        yield Proxy(f"mean {title} of the rows that the recipes keep", "no training", statistic_means)


def _compute_retained_share(experiment: ExperimentResults) -> float:
    run = experiment.runs[0]
    return (run.synthesize or run.filter).rows_kept / run.filter.rows_in


def _average_statistics(experiment: ExperimentResults) -> dict[str, float]:
    """Return the mean of each statistic in `STATISTICS` that the last recipe measures."""
    stages = experiment.runs[0].stages
    stage = "synthesize" if "synthesize" in stages else "filter"
    dropped = {row["id"] for row in read_jsonl(stages[stage] / "dropped.jsonl") if row["event"] == "dropped"}
    values: dict[str, list[float]] = {name: [] for name in STATISTICS}
    for row in read_jsonl(stages[stage] / "stats.jsonl"):
        if row["id"] not in dropped:
            for name, numbers in values.items():
                numbers += row.get(name, [])
    return {name: float(np.mean(numbers)) for name, numbers in values.items() if numbers}


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
