"""Simultaneous perturbation with directions of their own for the examples of a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tezo.directions.products import float32_on_emulating_cpu
from tezo.directions.spaces import Direction
from tezo.forward.blocks import Blocks, NotInBlocksError
from tezo.forward.perturbed_parameter import Shift, evaluation_mode, let_interrupt
from tezo.optim.estimators.estimate import Closure, Estimate, Probe, RowsClosure, StepDraw, precise
from tezo.optim.estimators.two_point import TwoPoint, average, fitting_copies
from tezo.system.errors import RequestError
from tezo.system.ranks import Ranks

Drawn = Mapping[str, Sequence[Direction]]
"""Parameter name -> its directions."""

MOST_INFLUENCE = 0.05
"""Largest change of an example's loss by the directions of the others, as a part of the change by its own: rounding."""


class PerExample(TwoPoint):
    """The estimate (1/(B q)) sum_i sum_j kappa_ij Z_ij over B examples, each with q directions of its own.

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
        source, drawn = _source(closure), draw.directions
        q = len(next(iter(drawn.values())))
        with self._one_row_for_each_example():
            measured = [self._both(source, drawn, j, self.rho) for j in range(q)]
            checked = draw.count == 0 and measured[0].shape[1] > 1
            if checked:
                self._check_apart(source, drawn, measured[0])
        probes = self._probes(torch.stack(measured).double(), self.rho)
        loss = sum(probe.loss_plus + probe.loss_minus for probe in probes) / (2 * len(probes))
        return average(loss, probes, self.passes(q, first=checked), draw)

    def passes(self, directions: int, *, first: bool) -> int:
        return 2 * directions + 2 * first

    def probes(self, closure: Closure, drawn: Drawn, rho: float) -> tuple[Probe, ...]:
        """The measurements of each example along its own directions: that of example i along Z_ij at place i q + j."""
        source, q = _source(closure), len(next(iter(drawn.values())))
        with self._one_row_for_each_example():
            measured = [self._both(source, drawn, j, rho) for j in range(q)]
        return self._probes(torch.stack(measured).double(), rho)

    @contextmanager
    def _one_row_for_each_example(self) -> Iterator[None]:
        """Context of passes in evaluation mode, and a sentence where a tuned layer sees other rows."""
        with evaluation_mode(self._model), float32_on_emulating_cpu(self._model):
            try:
                yield
            except NotInBlocksError:
                raise RequestError(
                    "directions is per-example, but a tuned layer does not see one row for each example (the experts "
                    "of a mixture, for one, or position embeddings); leave it out of the targets, or use "
                    "directions=shared."
                ) from None

    def _both(
        self,
        source: "RowsClosure | _PlainClosure",
        drawn: Drawn,
        j: int,
        rho: float,
        place: Callable[[int], int] = lambda i: i,
    ) -> Tensor:
        """(2, B): the losses of example i at both signs of its j-th direction, or of that of example place(i)."""

        def at(*scales: float) -> Tensor:
            return self._losses(source, drawn, j, scales, place)

        if isinstance(source, RowsClosure) and fitting_copies(source.example_tokens, dense=False) >= 2:
            return at(rho, -rho)
        return torch.cat([at(rho), at(-rho)])

    def _check_apart(self, source: "RowsClosure | _PlainClosure", drawn: Drawn, losses_2B: Tensor) -> None:
        """An error where an example's loss depends on the directions of others: kappa would be of all of them."""
        count = losses_2B.shape[1]
        # every other example has another direction, in passes of the same shapes: others round differently
        moved_2B = self._both(source, drawn, 0, self.rho, place=lambda i: i + count * (i % 2))
        change = (moved_2B - losses_2B)[:, ::2].abs().max()
        if change > MOST_INFLUENCE * (losses_2B[0] - losses_2B[1]).abs().max():
            raise RequestError(
                "directions is per-example, but the loss of a row depends on other rows of the batch, or a tuned layer "
                "has the rows in another order; use directions=shared."
            )

    def _losses(
        self,
        source: "RowsClosure | _PlainClosure",
        drawn: Drawn,
        j: int,
        scales: Sequence[float],
        place: Callable[[int], int],
    ) -> Tensor:
        """(copies, B): the loss of example i at scales[k] * Z for each copy k, Z the j-th direction of place(i)."""
        let_interrupt()
        known, seen = source.example_passes(), 0
        passes = None if known is None else iter(known)

        def begin(rows: int) -> None:
            nonlocal seen
            examples = range(seen, seen + rows) if passes is None else next(passes)
            if len(examples) * len(scales) != rows:
                raise NotInBlocksError
            seen += rows
            places = [place(i) for i in examples]
            for name, parameter in self._moving.items():
                parameter.set_perturbations([Shift(drawn[name][j], scale, places) for scale in scales])

        with self._blocks.before_each_pass(begin):
            try:
                losses: Tensor = precise(source.example_losses(len(scales)))
            finally:
                for parameter in self._moving.values():
                    parameter.set_perturbations([])
        if passes is None and losses.shape[1] != seen:
            raise RequestError(
                f"directions is per-example: the closure returned {losses.shape[1]} losses of {seen} rows; return one "
                "for each row of the model's passes, in their order."
            )
        return losses

    def _probes(self, losses_Q2B: Tensor, rho: float) -> tuple[Probe, ...]:
        plus, minus = (losses_Q2B[:, sign].T.flatten().tolist() for sign in (0, 1))  # index i q + j
        probes = tuple(Probe(p, m, (p - m) / (2 * rho)) for p, m in zip(plus, minus, strict=True))
        self._check(probes)
        return probes

    def accepts(self, probes: int, num_directions: int) -> bool:
        return probes > 0 and probes % num_directions == 0

    def share_directions(self, ranks: Ranks) -> None:
        del ranks
        raise RequestError(
            "train.parallel is directions, but each example has its own; set train.parallel=rows, which shares them."
        )


def _source(closure: Closure) -> "RowsClosure | _PlainClosure":
    return closure if isinstance(closure, RowsClosure) else _PlainClosure(closure)


class _PlainClosure:
    """A user's closure that returns the loss of each row: its i-th row, over all its passes, is example i."""

    def __init__(self, closure: Closure) -> None:
        self._closure = closure

    def example_passes(self) -> None:
        """Not known before the passes."""
        return

    def example_losses(self, copies: int) -> Tensor:
        assert copies == 1
        losses = self._closure()
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise RequestError(
                "directions is per-example, and the closure did not return the loss of each row, a tensor of shape "
                "(rows,); return losses without a mean, or use directions=shared."
            )
        return losses.unsqueeze(0)
