"""The perturbations of all parameters of a pass, set at once.

A step has few numbers for each layer, and an operation on them costs the same as one on those of all layers: on a GPU
several times as much as the arithmetic. So they are drawn, moved to the device and added up together.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tezo.directions.side_by_side import joined, split_like
from tezo.directions.spaces import Direction, FixedFactors, OwnNumbers, draw_together
from tezo.forward.beside_weight import InForward
from tezo.forward.blocks import column_of, draw_of
from tezo.forward.perturbed_parameter import PerturbedParameter, Shift

Drawn = Mapping[str, Sequence[Direction]]
"""Parameter name -> its directions."""

Place = tuple[torch.dtype, torch.device]


class Perturber:
    """Sets the perturbations of all parameters of a pass.

    Points of parameters with few coefficients are computed before the pass, into memory that later passes of the same
    shape use again. Each pass has them at the same addresses, so that a captured one can be repeated.

    Args:
        parameters: the tuned parameters by name.
    """

    def __init__(self, parameters: Mapping[str, PerturbedParameter]) -> None:
        self._parameters = parameters
        self._points: dict[tuple[Place, torch.Size], Tensor] = {}

    def perturb(self, drawn: Drawn, points: Sequence[tuple[int, float]], examples: Sequence[int] = range(1)) -> None:
        """Perturbs the j-th block of the rows by scale * Z_i, for the j-th of the points (i, scale).

        Args:
            drawn: the directions of the parameters.
            points: (i, scale); none: the parameters are as trained.
            examples: the examples of the rows of a block, whose directions may differ.
        """
        indices = list(dict.fromkeys(index for index, _ in points))
        used = [drawn[name][index] for name in self._parameters for index in indices]
        draws = [direction.draw for direction in used if isinstance(direction, FixedFactors)]
        draw_together([draw for draw in draws if isinstance(draw, OwnNumbers)], 1 + max(examples))
        groups: dict[Place, list[tuple[str, InForward]]] = {}
        for name, parameter in self._parameters.items():
            if points and isinstance(parameter, InForward) and parameter.has_few(len(points) * len(examples)):
                place = parameter.target.state_dtype, parameter.target.device
                groups.setdefault(place, []).append((name, parameter))
            else:
                parameter.set_perturbations(_shifts(drawn[name], points, examples))
        for place, group in groups.items():
            origins = [parameter.coefficient for _, parameter in group]
            moved_GX = self._moved(place, origins, [drawn[name] for name, _ in group], points, examples)
            for (name, parameter), own in zip(group, split_like(moved_GX, origins), strict=True):
                parameter.set_points(_shifts(drawn[name], points, examples), own)

    def _moved(
        self,
        place: Place,
        origins: Sequence[Tensor],
        drawn: Sequence[Sequence[Direction]],
        points: Sequence[tuple[int, float]],
        examples: Sequence[int],
    ) -> Tensor:
        """Returns c + scale * z of all parameters side by side, for all blocks and examples: (G, X)."""
        indices = dict.fromkeys(index for index, _ in points)
        z = {index: _side_by_side([draw_of(own[index])(examples) for own in drawn]) for index in indices}
        z_PBX = torch.stack([z[index] for index, _ in points]) if len(z) > 1 else next(iter(z.values())).unsqueeze(0)
        column = column_of(tuple(scale for _, scale in points), 2, *place)
        shape = torch.Size((len(points), *z_PBX.shape[1:]))
        if (place, shape) not in self._points:
            with torch.inference_mode(mode=False):  # an inference tensor could not be written outside inference mode
                self._points[place, shape] = torch.empty(shape, dtype=place[0], device=place[1])
        moved_PBX = self._points[place, shape]
        if len(examples) == 1:
            torch.addcmul(joined(origins), z_PBX, column, out=moved_PBX)
        else:  # rounded twice, as `block_points` does
            torch.mul(z_PBX, column, out=moved_PBX).add_(joined(origins))
        return moved_PBX.flatten(0, 1)


def _shifts(drawn: Sequence[Direction], points: Sequence[tuple[int, float]], examples: Sequence[int]) -> list[Shift]:
    return [Shift(drawn[index], scale, examples) for index, scale in points]


def _side_by_side(coefficients: Sequence[Tensor]) -> Tensor:
    """Returns the coefficients (B, *shape) of several parameters side by side: (B, X)."""
    if len(coefficients[0]) == 1:
        return joined(coefficients).unsqueeze(0)
    return torch.cat([own.flatten(1) for own in coefficients], 1)
