"""A learning rate for a method on a model and rows, from forward passes alone.

Over the subspace that the method perturbs, along directions Z of unit variance, let

    s^2 = |mu|^2                the squared norm of the gradient mu over all rows,
    g^2 = s^2 + sigma^2 / B     that of a batch of B rows, in expectation: what kappa^2 is on average,
    h = tr(H)                   the trace of the curvature: what Z^T H Z is on average.

A plain step W -= lr (1/q) sum_i kappa_i Z_i along q directions lowers the loss in expectation by

    lr s^2 - lr^2 / 2 * g^2 h / q,   which is greatest at   lr = q s^2 / (g^2 h),

in the leading terms for many dimensions: those in mu^T H mu, smaller by a factor of about that number, are left out.
A rule that divides the estimate by D (`Update.divisor`) takes D times that rate. With Adam on coefficients
D = g / sqrt(q), so lr = sqrt(q) s^2 / (g h); with normalised steps D = g, so lr = q s^2 / (g h). Where D changes in the
first steps, as in Adam without bias correction, its least value counts.

With kappa_1 ... kappa_K along the same direction on K disjoint parts of n rows each,

    s^2 = mean over pairs i != j of kappa_i kappa_j,   sigma^2 / n = mean kappa_i^2 - s^2,
    h = mean (loss_plus + loss_minus - 2 loss) / rho^2,

and then the mean over directions. (With two parts: kappa_A kappa_B and (kappa_A - kappa_B)^2 / 2.) The standard error
of s^2 is near sigma^2 sqrt(2) / (K n sqrt(directions)), and at least s^2 sqrt(2 / directions): where the noise of rows
is large, rows help more than directions. This is the best rate of one step at the start; how it changes later is not
known to it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tezo.estimators.estimate import Closure
from tezo.forward.evaluation_mode import evaluation_mode
from tezo.numerics.products import float32_on_emulating_cpu
from tezo.optim.tuner import Tuner

DIRECTIONS = 8
"""That are measured on each part."""
PARTS = 12
"""Of as many rows as a batch has, where there are so many."""


@dataclass(frozen=True)
class StepSize:
    """What was measured, and the learning rate that follows.

    Attributes:
        lr: the rate, in two digits, so that rounding elsewhere does not show in it.
        signal_sq: s^2, or its standard error where that is larger.
        batch_sq: g^2.
        curvature: h.
        num_forward_passes: evaluations of a part.
        notice: the sentence for the user.
    """

    lr: float
    signal_sq: float
    batch_sq: float
    curvature: float
    num_forward_passes: int
    notice: str


def choose_lr(optimizer: Tuner, parts: Sequence[Closure], rows: int, batch_size: int) -> StepSize:
    """Measures along directions that no step draws; the parameters and all that a run draws stay as they are.

    Args:
        optimizer: whose learning rate it is; the one that it has is taken where nothing can be measured.
        parts: the loss on each of at least two disjoint parts of the rows.
        rows: n, of a part.
        batch_size: B, of a step.

    Raises:
        NonFiniteLossError: a loss was NaN or infinite.
    """
    found = [_measure(optimizer, part) for part in parts]
    signal_sq, signal_error = _mean([_signal_sq(kappas) for kappas in zip(*(k for k, _ in found), strict=True)])
    own_sq = statistics.fmean([kappa**2 for kappas, _ in found for kappa in kappas])
    noise_sq = max(0.0, own_sq - signal_sq) * rows / batch_size
    curvature, curvature_error = _mean([statistics.fmean(bends) for bends in zip(*(b for _, b in found), strict=True)])

    used_sq = max(signal_sq, signal_error)
    batch_sq = used_sq + noise_sq
    lr, known = float(optimizer.param_groups[0]["lr"]), batch_sq > 0 and curvature > curvature_error
    if known:
        plain = optimizer.num_directions * used_sq / (batch_sq * curvature)
        lr = float(f"{plain * optimizer.step_divisor(batch_sq):.1e}")
    passes = len(parts) * (2 * DIRECTIONS + 1)
    notice = (
        f"method.lr: auto chose {lr:.1e}, "
        + ("" if known else "the method's default, since no curvature of the loss could be told from noise, ")
        + f"from {DIRECTIONS} directions on {len(parts) * rows} rows ({passes} forward passes): squared gradient "
        + f"{signal_sq:.2g} +- {signal_error:.1g}, noise of a batch {noise_sq:.2g}, "
        + f"curvature {curvature:.2g} +- {curvature_error:.1g}"
        + ("." if signal_sq > signal_error else "; the gradient is lost in noise, and its error stood in for it.")
    )
    return StepSize(lr, used_sq, batch_sq, curvature, passes, notice)


def _measure(optimizer: Tuner, part: Closure) -> tuple[list[float], list[float]]:
    """(kappa, Z^T H Z) along each direction."""
    with torch.no_grad(), evaluation_mode(optimizer.model), float32_on_emulating_cpu(optimizer.model):
        loss = float(part())
    probes = optimizer.measure(part, optimizer.rho, others=DIRECTIONS)
    bends = [(probe.loss_plus + probe.loss_minus - 2 * loss) / optimizer.rho**2 for probe in probes]
    return [probe.projected_grad for probe in probes], bends


def _signal_sq(kappas: Sequence[float]) -> float:
    """The mean of kappa_i kappa_j over pairs i != j."""
    count = len(kappas)
    return (sum(kappas) ** 2 - sum(kappa**2 for kappa in kappas)) / (count * (count - 1))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error)."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
