"""Simultaneous perturbation: two losses say how steep the objective is along a random direction (Eq. 2)."""

from collections.abc import Callable, Sequence

from tezo.distributed import Ranks
from tezo.estimators.estimate import BlockClosure, Closure, Probe, evaluate


def two_point(
    closure: Closure,
    show: Callable[[Sequence[tuple[int, float]]], None],
    rho: float,
    directions: Sequence[int],
    copies: int,
) -> tuple[Probe, ...]:
    """Evaluates `closure` at +rho and -rho along each direction; leaves the parameters where they were.

    Args:
        closure: returns the objective as a scalar; it need not be differentiable.
        show: lets the model compute with W + scale * Z_i, for each (i, scale) it is given one block; with none, W.
        rho: perturbation scale.
        directions: the indices of those to be evaluated.
        copies: how many models share a forward pass; above 1, `closure` must be a `BlockClosure`.
    """
    points = [(index, sign * rho) for index in directions for sign in (1, -1)]
    losses: list[float] = []
    try:
        for start in range(0, len(points), copies):
            part = points[start : start + copies]
            show(part)
            losses += evaluate(closure, len(part))
    finally:
        show([])
    pairs = zip(losses[::2], losses[1::2], strict=True)
    return tuple(Probe(plus, minus, (plus - minus) / (2 * rho)) for plus, minus in pairs)


def gather_probes(probes: tuple[Probe, ...], ranks: Ranks) -> tuple[Probe, ...]:
    """The probes of every rank's own directions, of which each has as many: those of its first, then of its second."""
    if ranks.size == 1:
        return probes
    found = ranks.gather([x for p in probes for x in (p.loss_plus, p.loss_minus, p.projected_grad)])
    of_rank = [[Probe(*values[i : i + 3]) for i in range(0, len(values), 3)] for values in found]
    return tuple(probe for of_one_turn in zip(*of_rank, strict=True) for probe in of_one_turn)


TOKENS_OF_A_PASS = 1024
"""Up to so many tokens, several models share a pass: below it a pass is bound by reading the weights, above it by
arithmetic. docs/cost.md has both measured, as J2 and N2."""

TOKENS_OF_A_DENSE_PASS = 8192
"""The same where dense noise is drawn once for all the models of a pass; the bound is for the activations' sake."""


def copies_of_a_pass(closure: Closure, directions: int, *, dense: bool) -> int:
    """How many models are evaluated in one forward pass: 1, or an even number, so that signs stay together.

    Args:
        closure: a plain one is evaluated once for every model.
        directions: of a step; two models each.
        dense: whether sharing a pass saves draws of dense noise.
    """
    if not isinstance(closure, BlockClosure):
        return 1
    fitting = (TOKENS_OF_A_DENSE_PASS if dense else TOKENS_OF_A_PASS) // max(1, closure.tokens)
    return max(1, min(2 * directions, fitting - fitting % 2))
