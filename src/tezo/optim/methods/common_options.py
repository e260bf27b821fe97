"""Options of all zeroth-order methods."""

from collections.abc import Sequence
from typing import TypedDict


class Common(TypedDict, total=False):
    """Options of every zeroth-order method; see `ZerothOrderOptimizer`."""

    rho: float
    weight_decay: float
    num_directions: int
    targets: Sequence[str]
    seed: int
    in_forward: bool
    frozen_rank: int | None
