"""MeZO's perturbation: every entry of Z is standard normal."""

from collections.abc import Mapping

from torch import Tensor

from tezo.directions import Dense
from tezo.params import Target
from tezo.perturbations.base import Moment, Perturbation, dense


class Gaussian(Perturbation):
    """z ~ N(0, I), drawn on the parameter's device and never stored (the resampling technique)."""

    def direction(self, target: Target, moment: Moment, state: Mapping[str, Tensor]) -> Dense:
        del state
        return dense(target, moment)
