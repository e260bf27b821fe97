"""The perturbation scale rho of a reward: as far as the text of the model changes, and not so far that it is none.

A score has no slope to measure a scale by. What is measured is the loss, per token, of answers that the model itself
wrote: at a member W + rho Z it rises by about c rho^2, the divergence of the member's text from the model's. rho is
where it rises by `RISE`.
"""

import math
from collections.abc import Callable

import torch

from tezo.directions.products import float32_on_emulating_cpu
from tezo.forward.perturbed_parameter import Shift, evaluation_mode
from tezo.optim.optimizer import ZerothOrderOptimizer

RISE = 0.1
"""Rise of the loss of the model's own answers at a member, in nats a token. In first trials with a model of 135M
parameters members at a rise of 0.05 learnt to write JSON in a form, and those at 0.5 wrote hardly any JSON."""
SCALES = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)
NEAR = 4.0
"""A rise of at most this many times `RISE` is near enough to follow rho^2 down to it."""
MEMBERS = 4
"""Members that the rise is averaged over, at most."""


@torch.no_grad()
def measure_reach(optimizer: ZerothOrderOptimizer, loss: Callable[[], float]) -> tuple[float, float]:
    """Returns (rho, the rise that was measured nearest to it), along directions of the next step.

    Args:
        optimizer: whose directions are used; its rho stays as it is.
        loss: mean loss per token of what the model wrote, at the parameters of the time of the call.
    """
    directions = optimizer.draw().directions
    count = min(MEMBERS, len(next(iter(directions.values()))))
    rise = math.inf
    with evaluation_mode(optimizer.model), float32_on_emulating_cpu(optimizer.model):
        own = loss()
        for rho in SCALES:
            total = 0.0
            try:
                for i in range(count):
                    for name, moving in optimizer.moving.items():
                        moving.set_perturbations([Shift(directions[name][i], rho)])
                    total += loss()
            finally:
                for moving in optimizer.moving.values():
                    moving.set_perturbations([])
            rise = total / count - own
            if math.isfinite(rise) and rise <= NEAR * RISE:
                break
    longer = math.sqrt(RISE / rise) if 0 < rise < math.inf else 3.0
    return float(f"{rho * min(3.0, longer):.1e}"), rise


def passes_of_reach() -> int:
    """Returns the forward passes that it takes, at most."""
    return 1 + MEMBERS * len(SCALES)
