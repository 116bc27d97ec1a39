"""The rows that the best recipes of a study agree on."""

from collections import Counter

import pandas as pd

from dj2mgm.reporting.experiment import ExperimentResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.study.proxies import full_scores
from dj2mgm.reporting.variants_page import PlainTable
from dj2mgm.reporting.verdicts.headline_verdicts import find_headline
from dj2mgm.storage.files import read_jsonl

MIN_VARIANTS = 4  # the best quarter of them, and at least two, are called the best


class RowAgreement:
    """The best recipes, and how many of them keep each row.

    Attributes:
        best: names of the best quarter of the variants, best first; empty for few variants, and if all keep equal rows.
        counts: number of the best recipes that keep a row, by the row's id; without rows that none of them keeps.
        total: number of rows before the recipes.
    """

    def __init__(self, experiments: list[ExperimentResults]):
        headline = find_headline(experiments)
        variants = {experiment.name: experiment for experiment in experiments if experiment.control is None}
        scores = full_scores(list(variants.values()), headline)
        ranked = sorted(scores, key=scores.__getitem__, reverse=not headline.lower_is_better)
        self.best = ranked[: max(2, len(ranked) // 4)] if len(ranked) >= MIN_VARIANTS else []
        rows = [_read_kept_ids(variants[name]) for name in self.best]
        if all(ids == rows[0] for ids in rows):
            self.best, rows = [], []
        self.counts = Counter(identifier for ids in rows for identifier in ids)
        self.total = _count_rows(variants[self.best[0]]) if self.best else 0


def _count_rows(experiment: ExperimentResults) -> int:
    """Return the number of rows that an experiment's recipes get."""
    run = experiment.runs[0]
    return (run.synthesize if run.selects_instructions else run.filter)["rows_in"]


def _read_kept_ids(experiment: ExperimentResults) -> frozenset[str]:
    """Return the ids of the rows that an experiment's recipes keep."""
    stages = experiment.runs[0].stages
    file = stages["synthesize"] / "synthesized.jsonl" if "synthesize" in stages else stages["filter"] / "filtered.jsonl"
    return frozenset(row["id"] for row in read_jsonl(file))


def agreement_table(agreement: RowAgreement) -> list[PlainTable]:
    """Return how many rows all, some and none of the best recipes keep; no table without best recipes."""
    best = len(agreement.best)
    if not best:
        return []
    kept_by_all = sum(count == best for count in agreement.counts.values())
    rows = {"all of them": kept_by_all, "some of them": len(agreement.counts) - kept_by_all}
    rows["none of them"] = agreement.total - len(agreement.counts)
    note = (
        f"The best {best} variants by the headline are {', '.join(agreement.best)}. The table counts the rows that "
        "their recipes keep. The file *_rows.csv lists the ids of these rows, and how many of the recipes keep each."
    )
    cells = [[title, format_integer(n), f"{100 * n / max(1, agreement.total):.0f} %"] for title, n in rows.items()]
    return [PlainTable("Rows that the best recipes agree on", note, ["Kept by", "Rows", "Share"], cells)]


def tabulate_rows(agreement: RowAgreement) -> pd.DataFrame:
    """Return the ids of the rows that the best recipes keep, most agreement first."""
    rows = sorted(agreement.counts.items(), key=lambda item: (-item[1], item[0]))
    return pd.DataFrame(rows, columns=["id", "best_recipes_that_keep_it"])
