"""Baselines with derivatives: Adam by backpropagation, and the forward gradient."""

from collections.abc import Sequence

from torch import nn

from tezo.directions.perturbation import DenseGaussian
from tezo.directions.targets import ALL, ALL_LINEAR
from tezo.optim.estimators.forward_mode import ForwardGradient
from tezo.optim.first_order import FirstOrderOptimizer
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import with_settings
from tezo.optim.updates import SGD


@with_settings
def adam(
    model: nn.Module,
    *,
    lr: float = 1e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    master_weights: bool = True,
    targets: Sequence[str] = (ALL,),
    seed: int = 0,
) -> FirstOrderOptimizer:
    """Adam: first-order fine-tuning by backpropagation, for comparison.

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,
        W <- W - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps),   g the gradient.

    This is the papers' FT; with `model.peft` it is their FT (LoRA) and FT (prefix). State: m and v, in the shape of the
    weights, in float32; with gradients and activations this is several times the memory of inference. Steps of weights
    in half precision are computed in float32: on a float32 copy of the weights (`master_weights`), or without one, and
    the result is rounded stochastically. `lr` is MeZO's
    for FT; `betas` and `eps` are torch's. Weight decay is decoupled.
    """
    return FirstOrderOptimizer(
        model,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        master_weights=master_weights,
        targets=targets,
        seed=seed,
    )


@with_settings
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
