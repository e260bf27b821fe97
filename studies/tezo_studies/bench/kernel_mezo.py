"""MeZO with its noise drawn in a kernel: the published passes over the weights, and no tensor of noise."""

from torch import nn

from tezo.directions.random import seed_of
from tezo_studies.bench.noise_kernel import add_normal_
from tezo_studies.bench.published import Published


class KernelMeZO(Published):
    """`Published`, in place. The update rounds bfloat16 weights stochastically, as the library does."""

    def perturb(self, scale: int) -> None:
        for name, parameter in self.parameters:
            add_normal_(parameter.data, scale * self.rho, seed_of(0, self.num_steps, name))

    def update(self, name: str, parameter: nn.Parameter, kappa: float) -> None:
        rounding = seed_of(1, self.num_steps, name) if parameter.element_size() == 2 else None
        add_normal_(parameter.data, -self.lr * kappa, seed_of(0, self.num_steps, name), rounding)
