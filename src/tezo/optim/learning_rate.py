"""Measuring a learning rate for a method, a model and a data set with forward passes only.

In the subspace that the method perturbs, along directions Z of unit variance, let

    s^2 = |mu|^2                the squared norm of the gradient mu over all rows,
    g^2 = s^2 + sigma^2 / B     the expected squared norm of the gradient of a batch of B rows; it equals E[kappa^2],
    h = tr(H)                   the trace of the Hessian; it equals E[Z^T H Z].

A plain step W -= lr (1/q) sum_i kappa_i Z_i along q directions lowers the loss in expectation by

    lr s^2 - lr^2 / 2 * g^2 h / q,   which is largest for   lr = q s^2 / (g^2 h).

These are the leading terms for many dimensions; terms in mu^T H mu, smaller by a factor of about the number of
dimensions, are neglected. An update rule that divides the estimate by D (`Update.divisor`) needs D times this rate.
With Adam on coefficients D = g / sqrt(q), so lr = sqrt(q) s^2 / (g h); with normalised steps D = g, so
lr = q s^2 / (g h). If D changes during the first steps, as in Adam without bias correction, its smallest value is used.

From kappa_1 ... kappa_K along one direction, measured on K disjoint parts of n rows each,

    s^2 = mean over pairs i != j of kappa_i kappa_j,   sigma^2 / n = mean kappa_i^2 - s^2,
    h = mean (loss_plus + loss_minus - 2 loss) / rho^2,

and these are averaged over directions. (With two parts: kappa_A kappa_B and (kappa_A - kappa_B)^2 / 2.) The standard
error of s^2 is about sigma^2 sqrt(2) / (K n sqrt(directions)), and at least s^2 sqrt(2 / directions). If the variance
between rows is large, more rows reduce it more than more directions. The result is the best learning rate for the
first step; the rates that are best later are not measured.
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
"""Number of directions measured on each part."""
PARTS = 12
"""Number of disjoint parts, each with as many rows as a batch if the data set is large enough."""


@dataclass(frozen=True)
class StepSize:
    """The measured quantities and the resulting learning rate.

    Attributes:
        lr: learning rate, rounded to two digits, so that it does not depend on rounding on different machines.
        signal_sq: s^2, or its standard error if that is larger.
        batch_sq: g^2.
        curvature: h.
        num_forward_passes: number of evaluations of a part.
        notice: message for the user.
    """

    lr: float
    signal_sq: float
    batch_sq: float
    curvature: float
    num_forward_passes: int
    notice: str


def choose_lr(optimizer: Tuner, parts: Sequence[Closure], rows: int, batch_size: int) -> StepSize:
    """Measures a learning rate, along directions that no step uses; the parameters and later draws are unchanged.

    Args:
        optimizer: the optimizer; its current learning rate is returned if no curvature can be measured.
        parts: the loss on each of at least two disjoint parts of the rows.
        rows: n, the number of rows of a part.
        batch_size: B, the number of rows of a step.

    Raises:
        NonFiniteLossError: a loss was NaN or infinite.
    """
    measured = [_measure(optimizer, part) for part in parts]
    signal_sq, signal_error = _mean([_signal_sq(kappas) for kappas in zip(*(k for k, _ in measured), strict=True)])
    part_sq = statistics.fmean([kappa**2 for kappas, _ in measured for kappa in kappas])
    noise_sq = max(0.0, part_sq - signal_sq) * rows / batch_size
    curvature, curvature_error = _mean(
        [statistics.fmean(along) for along in zip(*(c for _, c in measured), strict=True)]
    )

    used_sq = max(signal_sq, signal_error)
    batch_sq = used_sq + noise_sq
    lr, known = float(optimizer.param_groups[0]["lr"]), batch_sq > 0 and curvature > curvature_error
    if known:
        plain = optimizer.num_directions * used_sq / (batch_sq * curvature)
        lr = float(f"{plain * optimizer.step_divisor(batch_sq):.1e}")
    passes = len(parts) * (2 * DIRECTIONS + 1)
    notice = (
        f"method.lr: auto chose {lr:.1e}, "
        + ("" if known else "the method's default, because the measured curvature of the loss is not above its error, ")
        + f"from {DIRECTIONS} directions on {len(parts) * rows} rows ({passes} forward passes): squared gradient "
        + f"{signal_sq:.2g} +- {signal_error:.1g}, noise of a batch {noise_sq:.2g}, "
        + f"curvature {curvature:.2g} +- {curvature_error:.1g}"
        + ("." if signal_sq > signal_error else "; the gradient is not above its error, so the error was used instead.")
    )
    return StepSize(lr, used_sq, batch_sq, curvature, passes, notice)


def _measure(optimizer: Tuner, part: Closure) -> tuple[list[float], list[float]]:
    """(kappa, Z^T H Z) along each direction."""
    with torch.no_grad(), evaluation_mode(optimizer.model), float32_on_emulating_cpu(optimizer.model):
        loss = float(part())
    probes = optimizer.measure(part, optimizer.rho, others=DIRECTIONS)
    curvatures = [(probe.loss_plus + probe.loss_minus - 2 * loss) / optimizer.rho**2 for probe in probes]
    return [probe.projected_grad for probe in probes], curvatures


def _signal_sq(kappas: Sequence[float]) -> float:
    """The mean of kappa_i kappa_j over pairs i != j."""
    count = len(kappas)
    return (sum(kappas) ** 2 - sum(kappa**2 for kappa in kappas)) / (count * (count - 1))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error of the mean)."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
