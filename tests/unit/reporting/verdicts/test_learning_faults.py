"""Signs that a training taught nothing, in simulated trainings with noisy batches and images."""

import numpy as np
import pytest
from scipy import stats

from dj2mgm.evaluation.run_scores import MetricValues
from dj2mgm.reporting.verdicts.headline_verdicts import find_unlearned
from dj2mgm.reporting.verdicts.learning_faults import compute_loss_trend, list_training_faults
from headline_pages import write_levels

LOGGED_STEPS, BATCH_NOISE, FALL = 135, 0.15, 0.1
STAGES = ("pretrain", "finetune")


@pytest.fixture
def experiments(tmp_path):
    """Write three experiments with two trainings each."""
    return write_levels(tmp_path, {"baseline": 0.5, "one": 0.5, "two": 0.5}, seeds=1)


class Simulation:
    """Losses and scores of the experiments of a page, drawn again for each page.

    Attributes:
        fall: fall of each loss.
        gain: rise of the held-out score in each stage.
        base: gain of the model before training from its own images; None if it was not measured.
    """

    def __init__(self, experiments, fall: float, gain: float, base: float | None):
        self.experiments, self.fall, self.gain, self.base = experiments, fall, gain, base
        self.rng = np.random.default_rng(0)

    def draw(self) -> set[str]:
        """Draw a page, and return the experiments that count as having learned nothing."""
        shape = np.exp(-5 * np.linspace(0, 1, LOGGED_STEPS))
        for run in (run for experiment in self.experiments for run in experiment.runs):
            for stage in STAGES:
                losses = 2 + self.fall * shape + BATCH_NOISE * self.rng.standard_normal(LOGGED_STEPS)
                run.steps[stage][:] = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
            values = run.scores.groups["finetune/own"]["answer_probability"]
            images = 0.3 * self.rng.standard_normal(len(values.ids))
            gains = {"base": self.base or 0.0, "pretrain": self.gain, "finetune": self.gain}
            own = images.copy()
            for model, gain in gains.items():
                own = own + gain + 0.05 * self.rng.standard_normal(len(values.ids))
                shuffled = images + 0.1 * self.rng.standard_normal(len(values.ids))
                if model == "finetune" or self.base is not None:
                    for group, sums in (("own", own), ("shuffled", shuffled), ("difference", own - shuffled)):
                        metric = MetricValues(values.ids, sums, values.counts, values.file)
                        run.scores.groups[f"{model}/{group}"] = {"answer_probability": metric}
        for experiment in self.experiments:
            experiment.__dict__.pop("groups", None)  # computed from the scores of the previous page
        return set(find_unlearned(self.experiments))


@pytest.mark.parametrize("base", [None, 0.0], ids=["no scores before training", "scores before training"])
def test_noise_does_not_hide_that_trainings_taught_something(experiments, base):
    page = Simulation(experiments, FALL, 0.1, base)
    pages = 150
    assert sum(bool(page.draw()) for _ in range(pages)) <= 0.01 * pages + 1


@pytest.mark.parametrize("base", [None, 0.0, 0.5], ids=["ignores images", "ignores images, measured", "uses images"])
def test_trainings_that_change_nothing_are_found(experiments, base):
    page, pages = Simulation(experiments, 0.0, 0.0, base), 60
    assert sum(len(page.draw()) for _ in range(pages)) >= 0.95 * 3 * pages - 5, "noise of 180 trainings"


@pytest.mark.slow
def test_errors_of_many_pages(experiments):
    for base in (None, 0.0):
        page = Simulation(experiments, FALL, 0.1, base)
        assert np.mean([bool(page.draw()) for _ in range(3000)]) <= 0.01
    for base in (None, 0.0, 0.5):
        page = Simulation(experiments, 0.0, 0.0, base)
        assert np.mean([len(page.draw()) / 3 for _ in range(1000)]) >= 0.95


def test_only_a_rising_loss_is_final_for_decide(experiments):
    Simulation(experiments, 0.0, 0.0, 0.5).draw()
    assert list_training_faults(experiments[0]) == []
    experiments[0].runs[0].steps["finetune"][:] = [{"step": step, "loss": 1 + step / 100} for step in range(1, 41)]
    assert "The loss of the stage finetune rose" in list_training_faults(experiments[0])[0].reason


@pytest.mark.parametrize("number", [3, 4, 20, 135])
def test_p_values_of_a_constant_loss_are_uniform(number):
    rng = np.random.default_rng(number)
    trends = [compute_loss_trend(BATCH_NOISE * rng.standard_normal(number)) for _ in range(2000)]
    for p_values in ([trend.p_fall for trend in trends], [trend.p_rise for trend in trends]):
        assert stats.binomtest(sum(p <= 0.05 for p in p_values), 2000).proportion_ci(0.999).low <= 0.05
    assert np.mean([trend.p_fall + trend.p_rise for trend in trends]) == pytest.approx(1)


def test_losses_without_a_trend():
    assert compute_loss_trend([2.0, 1.0]).p_fall == compute_loss_trend([1.0] * 50).p_fall == 1
    falling = compute_loss_trend(np.linspace(2, 1, 30) + 0.01 * np.random.default_rng(0).standard_normal(30))
    assert falling.p_fall < 1e-6 and falling.p_rise > 0.99
