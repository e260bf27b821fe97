"""GRZO: a direction of each example by signs, and steps over the spread of their differences."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from torch import Tensor, nn

from tezo.directions.perturbation import Perturbation, dense
from tezo.directions.random import DrawKey
from tezo.directions.spaces import SignedDense
from tezo.directions.targets import Target
from tezo.optim.estimators.estimate import Probe
from tezo.optim.estimators.per_example import PerExample
from tezo.optim.method import Method
from tezo.optim.optimizer import PER_EXAMPLE, Directions, ZerothOrderOptimizer
from tezo.optim.options import Basic, with_settings
from tezo.optim.updates import SGD
from tezo.system.errors import RequestError


class DenseSigned(Perturbation):
    """GRZO's z: noise whose rows and columns have signs of each example."""

    draws = SignedDense

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> SignedDense:
        del state
        return SignedDense(**vars(dense(target, key)))


class GroupRelative(PerExample):
    """`PerExample` with each difference of losses over the spread of all of them (GRZO):

        delta_i = f_i(W + rho Z_i) - f_i(W - rho Z_i),   kappa_i = delta_i / s,   s^2 = mean (delta_i - mean delta)^2.

    kappa has no unit, so that the rate is the size of an entry's step. Without a spread there is no step.
    """

    def _weighted(self, probes: tuple[Probe, ...]) -> tuple[Probe, ...]:
        differences = [probe.loss_plus - probe.loss_minus for probe in probes]
        spread = statistics.pstdev(differences)
        kappas = [difference / spread if spread else 0.0 for difference in differences]
        return tuple(replace(probe, projected_grad=kappa) for probe, kappa in zip(probes, kappas, strict=True))


@with_settings
def grzo(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    rho: float = 1e-3,
    directions: Directions = PER_EXAMPLE,
    **basic: Unpack[Basic],
) -> ZerothOrderOptimizer:
    """GRZO: a direction of each example, by signs of one draw of noise, and steps over the spread of their differences.

        Z_i = diag(r_i) Z diag(s_i),   r_i, s_i of signs,   delta_i = f_i(W + rho Z_i) - f_i(W - rho Z_i),
        W <- W - lr (1/B) sum_i (delta_i / s) Z_i,   s^2 = (1/B) sum_i (delta_i - mean delta)^2.

    A baseline of Tan et al. 2026 (arXiv 2606.02857); not in the paper. Two forward passes a step, and in each a product
    with Z more. State: none. `lr` is ours, the size of an entry's step up to a factor. The closure returns the loss of
    each row.

    Deviations: as in `mezo`. Where their estimate is divided by 2 rho, ours has this factor in `lr`; they add a small
    number to s, and we take no step where it is 0.
    """
    if directions != PER_EXAMPLE:
        raise RequestError(f"method.directions is {directions}; grzo is defined for {PER_EXAMPLE} only.")
    return ZerothOrderOptimizer(
        model, DenseSigned(), SGD(), lr=lr, rho=rho, directions=directions, estimator=GroupRelative, **basic
    )


METHOD = Method("grzo", grzo, in_paper=False, least_rows=2)
