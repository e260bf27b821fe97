"""The forward gradient: MeZO with exact derivatives along its directions."""

from collections.abc import Sequence

from torch import nn

from tezo.directions.perturbations import DenseGaussian
from tezo.directions.targets import ALL_LINEAR
from tezo.estimators.forward_mode import ForwardGradient
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.updates import SGD


def forward_gradient(
    model: nn.Module,
    *,
    lr: float = 1e-6,
    weight_decay: float = 0.0,
    num_directions: int = 1,
    targets: Sequence[str] = (ALL_LINEAR,),
    seed: int = 0,
) -> ZerothOrderOptimizer:
    """Forward gradient: MeZO with the exact derivative along z, by forward-mode differentiation.

        z ~ N(0, I),   W <- W - lr <grad f(W), z> z.

    A baseline of Zhang et al. 2024 (Baydin et al. 2022); not in the paper. It shows what the difference of two losses
    costs in accuracy: it has no perturbation scale. It is not memory-efficient: z of all parameters is stored during a
    step. It needs operations with a forward-mode derivative, which fused kernels and quantised layers lack. `lr`:
    MeZO's.

    Deviations: as in `mezo`.
    """
    return ZerothOrderOptimizer(
        model,
        DenseGaussian(),
        SGD(),
        lr=lr,
        estimator=ForwardGradient,
        weight_decay=weight_decay,
        num_directions=num_directions,
        targets=targets,
        seed=seed,
    )
