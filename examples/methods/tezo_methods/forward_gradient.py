"""Forward gradient: MeZO with the exact derivative along z, by forward-mode differentiation instead of two losses."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tezo.directions.perturbation import DenseGaussian
from tezo.directions.products import evaluation_mode
from tezo.directions.spaces import Direction
from tezo.directions.targets import ALL_LINEAR
from tezo.optim.closures import Closure
from tezo.optim.estimators.estimate import Estimate, Probe, StepDraw, average, precise
from tezo.optim.estimators.two_point import Drawn, TwoPoint, check_finite, gather_probes
from tezo.optim.method import Method
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.optim.options import with_settings
from tezo.optim.updates import SGD
from tezo.system.errors import RequestError
from tezo.system.signals import let_interrupt


class ForwardGradient(TwoPoint):
    """The estimate (1/q) sum_i kappa_i Z_i, with kappa_i = <grad f(W), Z_i> (Baydin et al. 2022).

    kappa is the limit of `TwoPoint` for rho -> 0, without its error in rho. One pass computes it together with the
    loss, by dual numbers: it takes about the time of two, and memory for Z of all tuned parameters and for a tangent
    beside each activation of a layer. All operations of the model need a forward-mode derivative.

    Args:
        rho: ignored; there is no perturbation scale.
    """

    rule = "forward-gradient"

    def __init__(self, rho: float) -> None:
        del rho
        super().__init__(rho=0.0)

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        probes = self.probes(closure, draw.directions, self.rho)
        loss = sum(probe.loss_plus for probe in probes) / len(probes)
        return average(loss, probes, self.passes(len(probes), first=False), draw)

    def passes(self, directions: int, *, first: bool) -> int:
        del first
        return directions

    def probes(self, closure: Closure, drawn: Drawn, rho: float) -> tuple[Probe, ...]:
        """Returns the losses at W, as both losses of a probe, and the derivatives along all directions.

        Args:
            closure: evaluates the objective; its loss must be a tensor.
            drawn: parameter name -> its directions.
            rho: ignored.

        Raises:
            RequestError: the loss has no forward-mode derivative.
            FloatingPointError: a loss or a derivative is NaN or infinite.
        """
        del rho
        with evaluation_mode(self._model):
            probes = tuple(
                self._probe(closure, {name: each[i] for name, each in drawn.items()}) for i in self._shared_out(drawn)
            )
        probes = gather_probes(probes, self._processes)
        check_finite(probes)
        return probes

    def _probe(self, closure: Closure, drawn: Mapping[str, Direction]) -> Probe:
        let_interrupt()
        called = _Called(self._model)
        try:
            # the fused kernels of attention have no forward-mode derivative
            with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
                duals = {f"model.{name}": self._dual(name, direction) for name, direction in drawn.items()}
                loss, tangent = precise(torch.func.functional_call(called, duals, (closure,))), None
                if isinstance(loss, Tensor):
                    loss, tangent = forward_ad.unpack_dual(loss)  # type: ignore[no-untyped-call]
        except NotImplementedError as error:
            raise RequestError(
                f"method.name is forward-gradient, and an operation of this model has no forward-mode derivative "
                f"({' '.join(str(error).split())[:120]}); use mezo."
            ) from None
        if tangent is None:
            raise RequestError(
                "method.name is forward-gradient, and the loss has no derivative along the tuned parameters; return "
                "it as a tensor, or use mezo."
            )
        return Probe(float(loss), float(loss), float(tangent))

    def _dual(self, name: str, direction: Direction) -> Tensor:
        """W + epsilon Z as a dual number."""
        target = self._parameters[name].target
        tangent = torch.zeros_like(target.parameter.data)
        direction.add_to_(tangent.view(target.stored_shape), 1.0)
        dual: Tensor = forward_ad.make_dual(target.parameter.data, tangent)  # type: ignore[no-untyped-call]
        return dual


class _Called(nn.Module):
    """Calls a closure as a part of the model, whose parameters `functional_call` replaces meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, closure: Closure) -> Tensor | float:
        return closure()


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


METHOD = Method(
    "forward-gradient", forward_gradient, in_paper=False, needs="derivatives by forward-mode differentiation"
)
