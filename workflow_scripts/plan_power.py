"""Write the smallest difference that a comparison would show, and what one more seed costs, before it is run.

    python workflow_scripts/plan_power.py --config results/plan/power.yaml --output results/plan/power.txt

The noise is measured in finished runs. Without finished runs, it is a typical value.
"""

import numpy as np

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.cli.messages import format_duration
from dj2mgm.reporting.comparison import SCORE_TITLES, format_difference
from dj2mgm.reporting.rendering import format_integer, join_words
from dj2mgm.reporting.verdicts.decision_cost import PowerSettings, compute_expected_contrast, find_noise
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.pages import sum_measured_seconds
from dj2mgm.settings.targets import ReportSection
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_text

SHOWN_SEEDS = (2, 3, 5, 10)


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output")
    write_text(paths.output, describe_power(load_settings(PowerSettings, paths.config)))


def describe_power(settings: PowerSettings) -> str:
    """Return the smallest difference that the planned images and seeds show, and the cost of one more seed."""
    title = SCORE_TITLES[settings.headline]
    headline = ReportSection(headline=settings.headline).locate_headline()
    noise = find_noise(settings, headline.group, headline.metric)
    if noise is None:
        return f"Power: the noise of the {title} is not known before a first run.\n"
    images = f"{format_integer(settings.images)} held-out images"
    images += "" if settings.images_are_known else " (assumed, since the dataset is not made yet)"

    def describe_smallest(seeds: int, share: float = 0.5) -> str:
        contrast = compute_expected_contrast(noise.at_quantile(share), settings.images, seeds)
        return format_difference(headline.metric, contrast.compute_detectable()).lstrip("+")

    several = sorted({*SHOWN_SEEDS, settings.seeds} - {1})
    smallest = [describe_smallest(seeds) for seeds in several]
    shown = smallest.index(smallest[-1]) + 1  # more seeds change nothing
    pairs = zip(smallest[:shown], several, strict=False)
    sizes = [f"{size} with {seeds}{' seeds' * (not index)}" for index, (size, seeds) in enumerate(pairs)]
    end = "" if shown == len(several) else f" More seeds change nothing, because {images} limit it."
    lines = [
        f"Power: how small a true difference would four of five comparisons find, on {images}? In the {title} "
        f"{', '.join(sizes)}.{end}"
    ]
    if settings.seeds == 1:
        lines.insert(
            0,
            "One seed, as in your configuration, cannot tell better data from chance, because another seed changes "
            "both models. `seeds=[0,1,2]` can.",
        )
    if np.isfinite(noise.seed_df):
        seeds = max(settings.seeds, SHOWN_SEEDS[0])
        least, most = (describe_smallest(seeds, share) for share in (0.1, 0.9))
        lines.append(
            f"The noise between seeds is an estimate. With {seeds} seeds, the smallest difference may be "
            f"{least.removesuffix(' points')} to {most} (80 % interval)."
        )
    lines.append(f"Noise: {join_words(list(noise.sources))}.")
    lines.append(_describe_time(settings))
    return "\n".join(lines) + "\n"


def _describe_time(settings: PowerSettings) -> str:
    names = [name for name in dict.fromkeys([settings.experiment, REFERENCE]) if name in settings.finished]
    seconds = sum_measured_seconds(settings.finished[name][-1].stages for name in names)
    if seconds is None:
        return "The time of one more seed is known after a first run."
    return f"One more seed of {join_words(names)} takes about {format_duration(seconds)}, as measured in the last run."


if __name__ == "__main__":
    main()
