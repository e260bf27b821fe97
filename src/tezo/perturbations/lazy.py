"""LOZO's perturbation: one factor fresh every step, the other kept over an interval."""

from functools import partial

import torch
from torch import Tensor

from tezo.directions import LowRank
from tezo.params import Target
from tezo.perturbations.base import LowRankPerturbation, Moment, Scale, check_interval
from tezo.random import fill_normal_, normal
from tezo.rank import RankRule


class Lazy(LowRankPerturbation):
    """Z_t = U_t V_k^T: u_MR drawn every step, v_NR every `lazy_update_interval` steps.

    Unit scale: V carries r^(-1/2).
    """

    def __init__(self, rank: RankRule, scale: Scale, lazy_update_interval: int) -> None:
        super().__init__(rank, scale)
        check_interval(lazy_update_interval)
        self.interval: int = lazy_update_interval

    def matrix_direction(self, target: Target, moment: Moment) -> LowRank:
        born = moment.step - moment.step % self.interval
        refreshed = born == moment.step and born > 0
        columns, rank = target.matrix_shape[1], self._ranks[target.name]
        return LowRank(
            draw=partial(self._u, target, moment),
            v_NR=self.factors(target, moment.seed, born)["v"],
            born=born,
            previous_v=partial(self._v, target, moment.seed, born - self.interval) if refreshed else None,
            gram=columns * self._factor(rank) ** 2,
        )

    def _u(self, target: Target, moment: Moment) -> Tensor:
        # M x r numbers every step are too many for the CPU: like dense noise they come from the weight's device
        shape = target.matrix_shape[0], self._ranks[target.name]
        u_MR = torch.empty(shape, dtype=target.state_dtype, device=target.device)
        return fill_normal_(u_MR, seed=moment.seed, step=moment.step, name=target.name, role=f"u.{moment.index}")

    def _v(self, target: Target, seed: int, born: int) -> Tensor:
        return self._place(self.draw_factors(target, target.name, seed, born)["v"], target)

    def draw_factors(self, target: Target, owner: str, seed: int, born: int) -> dict[str, Tensor]:
        columns, rank = target.matrix_shape[1], self._ranks[target.name]
        v_NR = normal((columns, rank), seed=seed, step=born, name=owner, role="v")
        return {"v": v_NR * self._factor(rank)}

    def _factor(self, rank: int) -> float:
        return 1.0 if self.scale == "raw" else float(rank**-0.5)
