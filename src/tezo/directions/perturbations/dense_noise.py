"""MeZO's perturbation: every entry of Z is standard normal."""

from collections.abc import Mapping

from torch import Tensor

from tezo.directions.perturbations.perturbation import DrawKey, Perturbation, dense
from tezo.directions.spaces import Dense
from tezo.directions.targets import Target


class DenseGaussian(Perturbation):
    """z ~ N(0, I), drawn on the parameter's device and redrawn from its key instead of being stored."""

    def direction(self, target: Target, key: DrawKey, state: Mapping[str, Tensor]) -> Dense:
        del state
        return dense(target, key)
