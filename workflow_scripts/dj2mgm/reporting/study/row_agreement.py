"""The rows that the best recipes of a study agree on."""

from collections import Counter
from math import prod
from pathlib import Path

from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.study.proxies import read_full_scores
from dj2mgm.reporting.variants_page import PlainTable
from dj2mgm.reporting.verdicts.headline_scores import find_headline
from dj2mgm.storage.files import read_jsonl

MIN_VARIANTS = 4  # the best quarter of them, and at least two, are called the best


class RowAgreement:
    """The best recipes, and how many of them keep each row; variants that keep equal rows count as one recipe.

    Attributes:
        best: names of the best variants, best first.
        kept_counts: number of rows that each recipe of the best variants keeps. It is empty for fewer than
            `MIN_VARIANTS` variants, for a single recipe, and for recipes of different datasets or kinds of rows.
        counts: number of these recipes that keep a row, by the row's id; without rows that no recipe keeps.
        total: number of rows that the recipes got.
    """

    def __init__(self, experiments: list[ExperimentResults]):
        headline = find_headline(experiments)
        scores = read_full_scores(experiments, headline)
        ranked = sorted(scores, key=scores.__getitem__, reverse=not headline.lower_is_better)
        self.best = ranked[: max(2, len(ranked) // 4)] if len(ranked) >= MIN_VARIANTS else []
        self.kept_counts: list[int] = []
        self.counts: Counter[str] = Counter()
        self.total = 0
        by_name = {experiment.name: experiment for experiment in experiments}
        best = [by_name[name] for name in self.best]
        if len({(variant.dataset, variant.runs[0].selects_instructions) for variant in best}) == 1:
            self._count(best)

    def _count(self, best: list[ExperimentResults]) -> None:
        """Count the recipes that keep each row; without two different recipes, nothing is counted."""
        recipes: set[int] = set()  # hashes of ids, so that one recipe's ids are in memory at a time
        inputs: set[str] = set()
        for files in dict.fromkeys(map(_list_files, best)):
            kept_file, *dropped_files = files
            ids = frozenset(row["id"] for row in read_jsonl(kept_file))
            inputs |= ids
            for file in dropped_files:
                inputs.update(row["id"] for row in read_jsonl(file) if row["event"] == "dropped")
            if hash(ids) not in recipes:
                recipes.add(hash(ids))
                self.kept_counts.append(len(ids))
                self.counts.update(ids)
        if len(self.kept_counts) < 2:
            self.kept_counts, self.counts = [], Counter()
        self.total = len(inputs)


def _list_files(experiment: ExperimentResults) -> tuple[Path, ...]:
    """Return the file with an experiment's kept rows, and the files with its dropped rows."""
    run = experiment.runs[0]
    folders = [run.stages[stage] for stage in ("filter", "synthesize") if stage in run.stages]
    kept_file = folders[-1] / ("synthesized.jsonl" if len(folders) == 2 else "filtered.jsonl")
    return kept_file, *(folder / "dropped.jsonl" for folder in folders[-1 if run.selects_instructions else 0 :])


def build_agreement_table(agreement: RowAgreement) -> list[PlainTable]:
    """Return how many rows all, some and none of the best recipes keep; no table without different recipes."""
    number = len(agreement.kept_counts)
    if not number:
        return []
    kept_by_all = sum(count == number for count in agreement.counts.values())
    rows = {"all of them": kept_by_all, "some of them": len(agreement.counts) - kept_by_all}
    rows["none of them"] = agreement.total - len(agreement.counts)
    by_chance = agreement.total * prod(count / agreement.total for count in agreement.kept_counts)
    note = (
        f"The best variants by the headline are {', '.join(agreement.best)}. The table counts the rows that their "
        f"{number} different recipes keep. If the recipes kept as many rows at random, all of them would agree on "
        f"about {format_integer(round(by_chance))}. The file *_rows.jsonl lists the ids of the rows that at least one "
        "recipe keeps, with the number of recipes."
    )
    cells = [[title, format_integer(count), f"{100 * count / agreement.total:.0f} %"] for title, count in rows.items()]
    return [PlainTable("Rows that the best recipes agree on", note, ["Kept by", "Rows", "Share"], cells)]


def list_rows(agreement: RowAgreement) -> list[dict]:
    """Return the ids of the rows that the best recipes keep, most agreement first."""
    rows = sorted(agreement.counts.items(), key=lambda item: (-item[1], item[0]))
    return [{"id": identifier, "recipes": count} for identifier, count in rows]
