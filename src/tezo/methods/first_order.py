"""Baselines with derivatives: Adam by backpropagation, and the forward gradient."""

from collections.abc import Sequence

from torch import nn

from tezo.directions.targets import ALL
from tezo.optim.first_order import FirstOrderOptimizer
from tezo.optim.options import with_settings


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
