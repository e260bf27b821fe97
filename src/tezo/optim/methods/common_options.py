"""Options of all zeroth-order methods."""

from collections.abc import Sequence
from typing import TypedDict

from tezo.optim.optimizer import Directions


class Common(TypedDict, total=False):
    """Options of every zeroth-order method; see `ZerothOrderOptimizer`."""

    rho: float
    weight_decay: float
    num_directions: int
    targets: Sequence[str]
    seed: int
    in_forward: bool
    directions: Directions
    frozen_rank: int | None
