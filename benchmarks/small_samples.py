r"""Measure how often a page decides with fewer held-out images and seeds than finished runs have.

    python benchmarks/small_samples.py --results results/shapes/tiny --experiments baseline dj_synth \
        --images 100 --seeds 2 --draws 200

The first experiment is the reference. Each draw takes images and seeds at random, without replacement, and makes the
verdict of a report of these experiments on the second experiment, by each headline (`build_headline_verdicts`).
Verdicts of different draws are not independent, because all draws come from the same runs. A JSON line is printed for
each headline. With `--every-seed-pair`, all images are used, and the seeds are every pair of seeds of the reference
with every ordered pair of the second experiment. This ignores that equal seeds share their noise, so it suits an
experiment that should not differ from the reference.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow_scripts"))

import numpy as np

from dj2mgm.evaluation.run_scores import drop_images, select_metrics
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults, load_experiments
from dj2mgm.reporting.verdicts.assessment import Assessment

HEADLINES = ("answer_probability", "answer_log_likelihood", "vqa_accuracy")
Page = list[ExperimentResults]  # the reference first


def with_headline(page: Page, headline: str) -> Page:
    """Return the experiments with a headline, and without the scores that it does not need.

    Controls of absent experiments are compared as other experiments are.
    """
    names = {experiment.name for experiment in page}
    report = page[0].config.report.model_copy(update={"headline": headline})
    return [
        replace(
            experiment,
            config=experiment.config.model_copy(update={"report": report}),
            control=experiment.control
            if experiment.control and names.issuperset(experiment.control.compared or ())
            else None,
            runs=[replace(run, scores=select_metrics(run.scores, {headline})) for run in experiment.runs],
        )
        for experiment in page
    ]


def draw_samples(page: Page, images: int, seeds: int, draws: int) -> Iterator[Page]:
    """Yield the experiments on drawn images and with drawn seeds, which are the same for all experiments."""
    rng = np.random.default_rng(0)
    ids = np.unique([row["id"] for row in page[0].evaluation])
    common_seeds = sorted(set.intersection(*(set(experiment.seeds) for experiment in page)))
    for _ in range(draws):
        dropped_ids = set(rng.permutation(ids)[images:])
        drawn_seeds = set(rng.choice(common_seeds, seeds, replace=False))
        yield [
            replace(
                experiment,
                runs=[
                    replace(run, scores=drop_images(run.scores, dropped_ids))
                    for run in experiment.runs
                    if run.seed in drawn_seeds
                ],
            )
            for experiment in page
        ]


def pair_all_seeds(page: Page) -> Iterator[Page]:
    """Yield two experiments with every pair of seeds of the first and every ordered pair of the second, renumbered."""
    reference, experiment = page

    def renumber(runs: tuple[RunResults, ...]) -> list[RunResults]:
        return [replace(run, seed=seed, scores=replace(run.scores, seed=seed)) for seed, run in enumerate(runs)]

    for reference_runs in combinations(reference.runs, 2):
        for runs in permutations(experiment.runs, 2):
            yield [replace(reference, runs=renumber(reference_runs)), replace(experiment, runs=renumber(runs))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=Path("results/shapes/tiny"), help="folder with a finished report"
    )
    parser.add_argument("--experiments", nargs="+", default=["baseline", "dj_synth"], help="the reference first")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--every-seed-pair", action="store_true")
    args = parser.parse_args()
    results = args.results.absolute()
    os.chdir(results.parents[2])  # the page's configuration has paths relative to it
    configuration = results / "report/config.yaml"
    experiments = {experiment.name: experiment for experiment in load_experiments(configuration)}
    for headline in HEADLINES:
        page = with_headline([experiments[name] for name in args.experiments], headline)
        samples = (
            pair_all_seeds(page) if args.every_seed_pair else draw_samples(page, args.images, args.seeds, args.draws)
        )
        kinds = Counter(Assessment(sample).verdicts[0].kind or "withheld" for sample in samples)
        print(json.dumps({"headline": headline, "verdicts": dict(kinds.most_common())}), flush=True)


if __name__ == "__main__":
    main()
