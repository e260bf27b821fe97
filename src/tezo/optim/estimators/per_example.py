"""Simultaneous perturbation with per-example directions."""

from collections.abc import Callable

import torch
from torch import Tensor

from tezo.directions.products import evaluating
from tezo.forward.blocks import Blocks, NotInBlocksError
from tezo.optim.closures import Closure, RowLosses
from tezo.optim.estimators.estimate import Estimate, Probe, StepDraw, average, precise
from tezo.optim.estimators.two_point import Drawn, TwoPoint, fitting_copies, probes_of
from tezo.system.errors import RequestError
from tezo.system.processes import ProcessGroup
from tezo.system.signals import let_interrupt

MOST_INFLUENCE = 0.05
"""Largest change of an example's loss by other directions, as a part of the change by its directions: rounding."""


class PerExample(TwoPoint):
    """The estimate (1/(B q)) sum_i sum_j kappa_ij Z_ij over B examples, each with q separate directions.

    The rows of a batch do not read each other, so the two passes of one shared direction measure B directions:

        kappa_ij = (f_i(W + rho Z_ij) - f_i(W - rho Z_ij)) / (2 rho),   f = (1/B) sum_i f_i.

    For a given batch its variance is (d + 1) (|g|^2 + sigma^2) / (B q) in d dimensions, against (d + 1) |g|^2 / q with
    shared directions, where g is the mean of the examples' gradients g_i and sigma^2 the mean of |g_i - g|^2. The idea
    is Flipout's (Wen et al. 2018). Z_ij is a function of seed, step, i and j alone.

    Args:
        rho: perturbation scale.
        blocks: of the model's forward passes.
    """

    def __init__(self, rho: float, blocks: Blocks) -> None:
        super().__init__(rho)
        self._blocks = blocks

    def estimate(self, closure: Closure, draw: StepDraw) -> Estimate:
        probes, checked = self._measure(closure, draw.directions, self.rho, check=draw.count == 0)
        probes = self._weighted(probes)
        loss = sum(probe.loss_plus + probe.loss_minus for probe in probes) / (2 * len(probes))
        passes = self.passes(len(next(iter(draw.directions.values()))), first=checked)
        return average(loss, probes, passes, draw)

    def _weighted(self, probes: tuple[Probe, ...]) -> tuple[Probe, ...]:
        """Returns the measurements with the projected gradients that a step takes."""
        return probes

    def passes(self, directions: int, *, first: bool) -> int:
        return 2 * directions + 2 * first

    def probes(self, closure: Closure, drawn: Drawn, rho: float) -> tuple[Probe, ...]:
        """Returns the measurements along per-example directions: that of example i along Z_ij is at place i q + j."""
        return self._measure(closure, drawn, rho, check=False)[0]

    def ahead(self, closure: Closure, drawn: Drawn, rho: float) -> list[float]:
        count = len(next(iter(drawn.values())))
        with evaluating(self._model):
            losses = [self._losses(closure, drawn, j, (rho,), lambda i: i) for j in range(count)]
        return [float(value) for value in torch.cat(losses).double().T.flatten()]

    def _measure(self, closure: Closure, drawn: Drawn, rho: float, *, check: bool) -> tuple[tuple[Probe, ...], bool]:
        """Returns (the measurements, whether it was checked that examples do not depend on each other)."""

        def both(j: int, place: Callable[[int], int] = lambda i: i) -> Tensor:
            """(2, B): the losses of example i at both signs of its j-th direction, or of that of example place(i)."""
            together = isinstance(closure, RowLosses) and fitting_copies(closure.example_tokens, dense=False) >= 2
            passes = [(rho, -rho)] if together else [(rho,), (-rho,)]
            return torch.cat([self._losses(closure, drawn, j, scales, place) for scales in passes])

        try:
            with evaluating(self._model):
                losses = [both(j) for j in range(len(next(iter(drawn.values()))))]
                count = losses[0].shape[1]
                if check and count > 1:
                    # every other example has another direction, in passes of the same shapes: others round differently
                    moved_2B = both(0, lambda i: i + count * (i % 2))
                    self._check_apart(losses[0], moved_2B)
        except NotInBlocksError:
            raise RequestError(
                "directions is per-example, but a tuned layer does not see one row for each example (the experts "
                "of a mixture, for one, or position embeddings); leave it out of the targets, or use "
                "directions=shared."
            ) from None
        losses_Bq2 = torch.stack(losses).double().permute(2, 0, 1)
        return self._checked(probes_of(losses_Bq2.flatten().tolist(), rho)), check and count > 1

    def _check_apart(self, losses_2B: Tensor, moved_2B: Tensor) -> None:
        """Raises where an example's loss depends on the directions of others: kappa would be of all of them."""
        change = (moved_2B - losses_2B)[:, ::2].abs().max()
        if change > MOST_INFLUENCE * (losses_2B[0] - losses_2B[1]).abs().max():
            raise RequestError(
                "directions is per-example, but the loss of a row depends on other rows of the batch, or a tuned layer "
                "has the rows in another order; use directions=shared."
            )

    def _losses(
        self, closure: Closure, drawn: Drawn, j: int, scales: tuple[float, ...], place: Callable[[int], int]
    ) -> Tensor:
        """(copies, B): the loss of example i at scales[k] * Z for each copy k, Z the j-th direction of place(i)."""
        let_interrupt()
        passes = iter(closure.example_passes()) if isinstance(closure, RowLosses) else None
        seen = 0

        def begin(rows: int) -> None:
            nonlocal seen
            examples = range(seen, seen + rows) if passes is None else next(passes)
            if len(examples) * len(scales) != rows:
                raise NotInBlocksError
            seen += rows
            places = [place(i) for i in examples]
            self._perturber.perturb(drawn, [(j, scale) for scale in scales], places)

        with self._blocks.before_each_pass(begin):
            try:
                if isinstance(closure, RowLosses):
                    losses: Tensor = precise(closure.example_losses(len(scales)))
                    return losses
                losses = precise(row_losses(closure)).unsqueeze(0)
            finally:
                self._perturber.perturb(drawn, [])
        if losses.shape[1] != seen:
            raise RequestError(
                f"directions is per-example: the closure returned {losses.shape[1]} losses of {seen} rows; return one "
                "for each row of the model's passes, in their order."
            )
        return losses

    def accepts(self, probes: int, num_directions: int) -> bool:
        return probes > 0 and probes % num_directions == 0

    def share_directions(self, processes: ProcessGroup) -> None:
        del processes
        raise RequestError(
            "train.parallel is directions, but these are per example; set train.parallel=rows, which shares them."
        )


def row_losses(closure: Closure) -> Tensor:
    """Returns the losses of a user's closure, whose i-th row, over all its passes, is example i: (rows,)."""
    losses = closure()
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        raise RequestError(
            "directions is per-example, and the closure did not return the loss of each row, a tensor of shape "
            "(rows,); return losses without a mean, or use directions=shared, where the method has them."
        )
    return losses
