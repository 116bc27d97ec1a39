"""The analysis of a dataset, written to a folder; the page is made by reporting/analysis_page.py."""

from collections import Counter
from pathlib import Path

import pandas as pd
from data_juicer.analysis import OverallAnalysis

from files import sha256_of, write_jsonl, write_text
from formats.images import BadImage
from juicer.analysis import Analysis, measure
from juicer.dataset import iterate, stats_rows
from juicer.library import Fields, NestedDataset, __version__
from juicer.operators.image_integrity_filter import NAME as INTEGRITY
from juicer.operators.image_integrity_filter import STAT as IMAGE_INTEGRITY
from juicer.settings import StageSettings
from juicer.stage import working_folder
from juicer.statistics import Limits, Statistic
from juicer.suggestions import recipe_text

STATS, OVERALL, SUGGESTIONS = "stats.jsonl", "overall.csv", "suggestions.yaml"
PAGE, SUMMARY = "analysis.html", "summary.json"
PERCENTILES = [0.01, 0.05, 0.95, 0.99]  # beside Data-Juicer's own 25, 50 and 75 %


def analyze(settings: StageSettings, clip: str | None, data: Path, output_dir: Path) -> Analysis:
    """Measure `data`; write stats.jsonl, overall.csv and suggestions.yaml into `output_dir`.

    Raises:
        InputError: as `measure`. No output is then left behind, of an earlier run neither.
    """
    for name in (STATS, OVERALL, SUGGESTIONS, PAGE, SUMMARY):
        (output_dir / name).unlink(missing_ok=True)
    with working_folder(output_dir) as working:
        found, dataset = measure(settings, clip, data, working)
        unreadable = ({"id": identifier, IMAGE_INTEGRITY: reason} for identifier, reason in found.unreadable.items())
        write_jsonl(output_dir / STATS, [*stats_rows(dataset), *unreadable])
        write_text(output_dir / OVERALL, _overall(dataset, working).to_csv())
    write_text(output_dir / SUGGESTIONS, suggested_recipe(found))
    return found


def _overall(dataset: NestedDataset, working: Path) -> pd.DataFrame:
    """Data-Juicer's own table: count, mean, deviation, least, percentiles, greatest of every statistic."""
    stats = [
        {name: stats[name] for name in stats if name != IMAGE_INTEGRITY} for (stats,) in iterate(dataset, Fields.stats)
    ]
    analysis = OverallAnalysis({Fields.stats: stats, Fields.meta: [{}] * len(stats)}, str(working))
    return analysis.analyze(percentiles=PERCENTILES, skip_export=True)


def suggested_recipe(found: Analysis) -> str:
    """The contents of suggestions.yaml."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(found.unreadable.values()).items())
    drops = {INTEGRITY: f"drops {len(found.unreadable)} of {found.rows_in}{f': {reasons}' if reasons else ''}"}
    drops |= {name: f"drops {int(rows.sum())}: equal to an earlier row" for name, rows in found.repeats.items()}
    drops |= {name: f"not measured: {why}" for name, why in found.not_measured.items()}
    head = (
        f"Suggested by `snakemake analyze` for {found.data}: {found.rows_in} rows, of which {found.rows} can be read.\n"
        "Counts are what each limit would drop by itself, of the rows that can be read. All together would keep "
        f"{found.kept('suggested')} rows.\nLook at the examples in analysis.html before you believe a limit."
    )
    return recipe_text(head, found.process, found.statistics, drops)


def summarize(found: Analysis, clip: str | None) -> dict:
    """Counts that add up: rows in = unreadable + analyzed."""
    unreadable = Counter(found.unreadable.values())
    if found.rows_in != found.rows + sum(unreadable.values()):
        raise RuntimeError(f"{found.rows_in} rows came in, {found.rows} and {len(found.unreadable)} were accounted for")
    return {
        "rows_in": found.rows_in,
        "unreadable_images": {reason: unreadable[reason] for reason in BadImage.REASONS},
        "rows_analyzed": found.rows,
        "repeats": {name: int(rows.sum()) for name, rows in found.repeats.items()},
        "kept": {"current": found.kept("current"), "suggested": found.kept("suggested")},
        "statistics": {statistic.name: _summarize(statistic) for statistic in found.statistics},
        "not_measured": found.not_measured,
        "clip": clip,
        "data_juicer": __version__,
        "input": {"path": str(found.data), "sha256": sha256_of(found.data)},
    }


def _summarize(statistic: Statistic) -> dict:
    def limits(which: Limits) -> dict:
        return {
            limit.argument: {"limit": limit.written, "drops": int(limit.drops(statistic.values).sum())}
            | ({"reason": limit.reason} if limit.reason else {})
            for limit in which.values()
        }

    return {
        "operator": statistic.operator,
        "in_recipe": statistic.arguments is not None,
        "rows": len(statistic.finite),
        "current": limits(statistic.current),
        "suggested": limits(statistic.suggested),
        "remark": statistic.remark,
    }
