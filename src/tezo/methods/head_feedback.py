"""Head feedback, the method of this library: low-rank steps from forward passes and the gradient of the output head."""

from typing import Unpack

from torch import nn

from tezo.directions.bases.basis import Basis
from tezo.directions.low_rank import Lazy, Scale
from tezo.directions.ranks import FixedRank
from tezo.methods.bases import find_basis
from tezo.optim.base_optimizer import check_rate
from tezo.optim.estimators.feedback import DirectFeedback
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import Common, with_settings
from tezo.optim.updates import Adam, StepRule

FEEDBACK_UPDATE = Adam((0.9, 0.999), 1e-8, eps_in_sqrt=False, bias_correction=True)
"""Update rule of feedback steps: torch's Adam with torch's default settings."""


@with_settings
def head_feedback(
    model: nn.Module,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-5,
    rank: int = 8,
    basis: str | Basis = "activation",
    lazy_update_interval: int | None = None,
    scale: Scale = "unit",
    feedback_scale: float = 0.3,
    **common: Unpack[Common],
) -> ZerothOrderOptimizer:
    """Head feedback: Adam on one factor beside the layers' leading inputs, and the output head's gradient. Ours.

        Z_t = U_t V^T,   U_t (M x r) drawn every step, V (N x r) once,
        m <- b1 m + (1 - b1) kappa U_t,   v <- b2 v + (1 - b2) kappa^2 U_t^2   (entry by entry),
        A <- A - lr m / sqrt(v + eps),   W_t = W_0 + A V^T.

    The columns of V are the leading directions of the layer's inputs (`basis`), computed in forward passes over a few
    training rows before the first step. The rows of a gradient lie in the span of these inputs, and the gradients of
    different rows agree most along the leading directions (measurements: docs/theory.md). The output side is not
    restricted. W_0 is not written, and the result is an exact LoRA adapter of rank r.

    State: A, m and v (3 M x r, in float32), and V. With `lazy_update_interval` the basis is recomputed after this
    number of steps; A V^T is then folded into W (with `frozen_rank`: stored beside W), and m is carried over by
    projection. `lr` and `rank` are from the demo, a 22M-parameter encoder; `betas` and `eps` are TeZO-Adam's.

    The method takes more than forward passes: its feedback steps, `step(closure, rule="feedback")`, need the gradient
    of the last norm and the output head, and of nothing below them. They update A along the error at the last hidden
    states, with the learning rate `feedback_scale * lr` (`tezo.optim.estimators.feedback`). A run takes them according
    to `train.feedback_first` and `train.feedback_last`; those at the start have three times that rate. With both at 0 a
    run is forward passes alone.
    """
    update = Adam(betas, eps, eps_in_sqrt=True, bias_correction=False)
    perturbation = Lazy(FixedRank(rank=rank), scale, basis=find_basis(basis), interval=lazy_update_interval)
    check_rate("feedback_scale", feedback_scale)
    feedback = StepRule(DirectFeedback(perturbation.fixed), FEEDBACK_UPDATE, lr_scale=feedback_scale, restarts=True)
    return ZerothOrderOptimizer(model, perturbation, update, lr=lr, more_rules=(feedback,), **common)
