"""Signs that a training taught nothing, in simulated trainings with noisy batches and images."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from dj2mgm.evaluation.run_scores import MetricValues
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.learning_faults import (
    RISE_LEVEL,
    LearningFault,
    compute_rise_p_value,
    list_training_faults,
)
from headline_pages import write_levels

BATCH_NOISE = 0.15
STAGES = ("pretrain", "finetune")
STANDARD_ERROR = 0.005  # of a stage's change over the 100 images


@pytest.fixture
def experiments(tmp_path):
    """Write three experiments with two trainings each."""
    return write_levels(tmp_path, {"baseline": 0.5, "one": 0.5, "two": 0.5}, seeds=1)


@dataclass
class Simulation:
    """Losses and scores of the experiments of a page, drawn again for each page.

    Attributes:
        experiments: results that are overwritten.
        gains: change of the held-out score in each stage, in standard errors; None if the stage changes no weights.
        fall: fall of each loss.
        base: gain of the model before training from its own images; None if it was not measured.
        steps: number of logged steps.
        correlation: correlation between the losses of successive steps.
    """

    experiments: list[ExperimentResults]
    gains: tuple[float | None, float | None]
    fall: float = 0.1
    base: float | None = 0.5
    steps: int = 135
    correlation: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def draw_losses(self) -> np.ndarray:
        noise = draw_correlated(self.rng, self.correlation, self.steps)
        return 2 + self.fall * np.exp(-5 * np.linspace(0, 1, self.steps)) + BATCH_NOISE * noise

    def draw(self) -> dict[str, list[LearningFault]]:
        """Draw a page, and return the signs that experiments have learned nothing."""
        for run in (run for experiment in self.experiments for run in experiment.runs):
            for stage in STAGES:
                run.steps[stage][:] = [{"step": step, "loss": loss} for step, loss in enumerate(self.draw_losses(), 1)]
            values = run.scores.groups["finetune/own"]["answer_probability"]
            images = 0.3 * self.rng.standard_normal(len(values.ids))
            own = images + (self.base or 0.0)
            for model, gain in zip(("base", *STAGES), (None, *self.gains), strict=True):
                if gain is not None:
                    noise = 10 * STANDARD_ERROR * self.rng.standard_normal(len(own))
                    own = own + gain * STANDARD_ERROR + noise
                shuffled = images + 0.1 * self.rng.standard_normal(len(own))
                if model == "finetune" or self.base is not None:
                    for group, sums in (("own", own), ("shuffled", shuffled), ("difference", own - shuffled)):
                        metric = MetricValues(values.ids, sums, values.counts, values.file)
                        run.scores.groups[f"{model}/{group}"] = {"answer_probability": metric}
        for experiment in self.experiments:
            experiment.__dict__.pop("groups", None)  # computed from the scores of the previous page
        return Assessment(self.experiments).unlearned


def draw_correlated(rng: np.random.Generator, correlation: float, *shape: int) -> np.ndarray:
    """Return standard normal noise of an autoregressive process along the last axis."""
    white = rng.standard_normal((*shape[:-1], shape[-1] + 50))
    return lfilter([np.sqrt(1 - correlation**2)], [1, -correlation], white, axis=-1)[..., 50:]


REAL_TRAININGS = {
    "gains of 1 SE": {"gains": (1, 1)},
    "gains of 3 SE": {"gains": (3, 3)},
    "gains of 20 SE": {"gains": (20, 20)},
    "no scores before training": {"gains": (100, 20), "base": None},
    "few steps, scores as before after stage 1": {"gains": (0, 20), "fall": 0.3, "steps": 20},
    "correlated losses": {"gains": (20, 20), "correlation": 0.8},
}


@pytest.mark.parametrize(("pages", "most"), [(50, 0.02), pytest.param(3000, 0.01, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", REAL_TRAININGS.values(), ids=REAL_TRAININGS)
def test_noise_does_not_hide_that_trainings_taught_something(experiments, scenario, pages, most):
    page = Simulation(experiments, **scenario)
    assert np.mean([bool(page.draw()) for _ in range(pages)]) <= most


@pytest.mark.parametrize("base", [None, 0.0, 0.5], ids=["ignores images", "ignores images, measured", "uses images"])
def test_trainings_that_change_nothing_are_found(experiments, base):
    page = Simulation(experiments, (None, None), fall=0.0, base=base)
    assert sum(len(page.draw()) for _ in range(20)) >= (57 if base is None else 60), "95 % by the image rule alone"


def test_each_stage_is_compared_with_the_model_before_it(experiments):
    for gains, unchanged in (((None, 20), ["pretrain"]), ((20, None), ["finetune"]), ((20, 0), [])):
        for faults in Simulation(experiments, gains).draw().values() or [[]]:
            assert [fault.remedy.split()[1].split(".")[0] for fault in faults] == unchanged


@pytest.mark.parametrize(("templates", "expected"), [({"pretrain_template": "plain", "template": "v1"}, 3), ({}, 0)])
def test_captions_after_other_prompts_are_not_compared(experiments, templates, expected):
    page = Simulation(experiments, (20, None))
    page.draw()
    for experiment in experiments:
        experiment.config.model.model_extra.update(templates)
        for number, model in enumerate(STAGES):
            metrics = experiment.runs[0].scores.groups[f"{model}/own"]
            values = metrics["answer_probability"]
            metrics["caption_log_likelihood"] = replace(values, sums=0 * values.sums - number)
    faults = Assessment(experiments).unlearned.values()
    assert sum("finetune did not change" in fault.reason for own in faults for fault in own) == expected


def test_only_a_rising_loss_is_final_for_decide(experiments):
    Simulation(experiments, (None, None)).draw()
    assert list_training_faults(experiments[0]) == []
    experiments[0].runs[0].steps["finetune"][:] = [{"step": step, "loss": 1 + step / 100} for step in range(1, 41)]
    assert "The loss of the stage finetune rose" in list_training_faults(experiments[0])[0].reason


@pytest.mark.parametrize("number", [3, 20])
def test_p_values_of_a_constant_loss_are_uniform(number):
    rng = np.random.default_rng(number)
    p_values = [compute_rise_p_value(BATCH_NOISE * rng.standard_normal(number)) for _ in range(2000)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


@pytest.mark.parametrize(("steps", "correlation", "most"), [(20, 0.5, 0.002), (135, 0.8, 0.001)])
def test_correlated_losses_do_not_rise(steps, correlation, most):
    losses = draw_correlated(np.random.default_rng(steps), correlation, 4000, steps)
    assert np.mean([compute_rise_p_value(row) <= RISE_LEVEL for row in losses]) <= most + 0.001


def test_a_clear_rise_is_found():
    losses = np.linspace(0, 5 * BATCH_NOISE, 135) + BATCH_NOISE * np.random.default_rng(0).normal(size=(200, 135))
    assert np.mean([compute_rise_p_value(row) <= RISE_LEVEL for row in losses]) > 0.99


def test_losses_without_a_rise():
    assert compute_rise_p_value([1.0, 2.0]) == compute_rise_p_value([1.0] * 50) == 1
    assert compute_rise_p_value(np.linspace(2, 1, 30)) > 0.99
