"""Detection of diverged trainings: loss or gradient not finite, or a final loss far above the first one."""

import math
import statistics
from collections.abc import Sequence

from dj2mgm.errors import InputError

END_PART = 10  # the end of a training is its last 1 / END_PART
MIN_SAMPLES = 32  # least number of samples at the start and at the end
MAX_LOSS_NATS = 20.0  # a guess among 256 000 tokens has 12.5
LOSS_SPREAD_NATS = 3.0  # twice the spread of the loss from sample to sample

DIVERGED = "training diverged by step"  # in the message, by which the log of such a training is recognized

Losses = Sequence[tuple[int, float]]  # steps and mean losses in nats, as they were logged


class TrainingDivergedError(InputError):
    """Error of a training that cannot be used; the user sets the learning rate."""


def compute_loss_limit(losses: Losses, samples: int) -> float:
    """Return the loss above which a training has diverged.

    The start is the median over the first samples, which a single easy sample does not move. A training that learns
    does not exceed twice its start plus 1 nat. `LOSS_SPREAD_NATS` covers a start that is low by chance; the standard
    deviation of a mean over n samples is 1/√n of a sample's. `MAX_LOSS_NATS` is the bound for a training of fewer than
    2 * `MIN_SAMPLES` samples, and for one of small batches that explodes within its first samples.

    Args:
        losses: one or more losses.
        samples: number of samples per step.
    """
    highest = max(MAX_LOSS_NATS, 2 * losses[0][1] + 1)
    if len(losses) * samples < 2 * MIN_SAMPLES:
        return highest
    start = statistics.median(loss for _, loss in losses[: math.ceil(MIN_SAMPLES / samples)])
    return min(highest, 2 * start + 1 + LOSS_SPREAD_NATS / math.sqrt(samples))


def compute_end_loss(losses: Losses, samples: int) -> float:
    """Return the median of a training's last losses, which a single bad batch does not move."""
    rows = max(math.ceil(len(losses) / END_PART), math.ceil(MIN_SAMPLES / samples))
    return statistics.median(loss for _, loss in losses[-rows:])


def find_last_healthy_step(losses: Losses, samples: int) -> int:
    """Return the last logged step with a loss below `compute_loss_limit`; 0 if there is none."""
    highest = compute_loss_limit(losses, samples) if losses else math.inf
    healthy = [step for step, loss in losses if loss <= highest]
    return healthy[-1] if healthy else 0


def check_end(stage: str, losses: Losses, samples: int, learning_rate: float) -> None:
    """Raise TrainingDivergedError if a training ended far above its start."""
    if not losses:
        return
    end = compute_end_loss(losses, samples)
    if end > compute_loss_limit(losses, samples):
        (step, first), *_ = losses
        problem = f"the loss ended at {end:.4g}, far above the {first:.4g} of step {step}"
        raise make_divergence_error(stage, losses[-1][0], problem, learning_rate)


def check_finite(stage: str, step: int, value: float, learning_rate: float, name: str = "loss") -> None:
    """Raise TrainingDivergedError if a loss, or another value called `name`, is not finite."""
    if not math.isfinite(value):
        raise make_divergence_error(stage, step, f"the {name} is {value}", learning_rate)


def make_divergence_error(stage: str, step: int, problem: str, learning_rate: float) -> TrainingDivergedError:
    """Return the error of a training that diverged."""
    return TrainingDivergedError(
        f"{stage}: {DIVERGED} {step}: {problem}. The learning rate of {learning_rate:g} is probably too "
        f"high; set learning_rate of {stage} to a third of it or less"
    )
