# Values that wildcards may have.
import os
import re


def match_any(names):
    """Return a regular expression for one of these names."""
    return f"({'|'.join(map(re.escape, names)) or '(?!)'})"


def match_runs(experiments):
    """Return a regular expression for the folders of these experiments' runs, and of late variants that change them."""
    late_names = {
        source.late_names
        for source in RUNS.experiments.sources.values()
        if source.late_names and source.experiment in experiments
    }
    names = "|".join([match_any(experiments), *sorted(late_names)])
    parents = {os.path.dirname(RUNS.first_seed(name).folder) for name in experiments}
    return f"{match_any(sorted(parents))}/({names})(/seed-[0-9]+)?"


wildcard_constraints:
    run=match_runs(RUNS.experiments.configs),
    page=f"{re.escape(RESULTS_PREFIX)}(report|{match_any(EXPERIMENTS)}/report)",
    number="[0-9]+",
    dataset="[^/]+",
    model="[^/]+",
    stage=match_any(RUNS.stages),
