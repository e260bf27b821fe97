"""Optimism: by how much rows that directions were found by do better than others (Efron 2004).

A regression on rows foretells more of them than of others. Let P be what a direction should change their scores by, and
P' the same if each row had been left out of the regression. A step along it changes the scores z of a row by

    dz ~ s P' + r (P - P'),

of which the second part, its optimism, is not what other rows get. s and r of each column are fitted by least squares
when the rows are looked at again, less their means over rows and over classes. The scores of a row less the optimism of
all steps so far are what the model would say of it if it had not been looked at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUMBERS, SCORES, OPTIMISM = "numbers of rows", "scores of rows", "optimism of rows"
"""The names under which the rows of all looks, those of the newest first, the scores of these, and the optimism of
the steps before are kept: (N,), (E, C) and (N, C)."""


@dataclass(frozen=True)
class Foretold:
    """What a look foretells of its E rows, for J directions.

    Attributes:
        fitted_ECJ: P.
        without_ECJ: P'.
        optimism_EC: of the steps before, in scores.
    """

    fitted_ECJ: Tensor
    without_ECJ: Tensor
    optimism_EC: Tensor


def parts(change_TC: Tensor, without_TCK: Tensor, optimism_TCK: Tensor, *, together: bool) -> Tensor:
    """Returns r (K,): how much of the optimism of each direction is in a change of scores.

    Args:
        change_TC: one change, along all K; or (T, C, K), one along each.
        without_TCK: P'.
        optimism_TCK: P - P'.
        together: whether all K explain one change, or each its own.
    """
    y, *terms = (
        f - f.mean(0) - f.mean(1, keepdim=True) + f.mean((0, 1)) for f in (change_TC, without_TCK, optimism_TCK)
    )
    if together:
        x_X2K = torch.cat(terms, -1).flatten(0, 1)
        both_2K: Tensor = torch.linalg.pinv(x_X2K.T @ x_X2K, hermitian=True) @ (x_X2K.T @ y.flatten())
        return both_2K[terms[0].shape[-1] :]
    x_KX2 = torch.stack(terms, -1).movedim(2, 0).flatten(1, 2)
    y_KX1 = y.movedim(2, 0).flatten(1).unsqueeze(-1)
    each_K21: Tensor = torch.linalg.pinv(x_KX2.mT @ x_KX2, hermitian=True) @ (x_KX2.mT @ y_KX1)
    return each_K21[:, 1, 0]


def carried(
    numbers: Sequence[int], scores_EC: Tensor, before: Mapping[str, Tensor], columns: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Returns `NUMBERS`, `SCORES` and `OPTIMISM` of a look at rows with these scores.

    Args:
        numbers: of the rows; none: nobody knows which they are.
        scores_EC: their scores, float64.
        before: what the look before has kept; empty: there was none.
        columns: (what its columns foretold of its rows, with them and without each, (2, E, R); their classes (C, R)).
    """
    optimism_EC = torch.zeros_like(scores_EC)
    known = {int(number): i for i, number in enumerate(before[NUMBERS])} if NUMBERS in before else {}
    now = [e for e, number in enumerate(numbers) if number in known]
    then = [known[numbers[e]] for e in now]
    here = {*numbers}
    left = [i for number, i in known.items() if here and number not in here]
    if now:
        optimism_EC[now] = before[OPTIMISM][then]
        looked = [(e, i) for e, i in zip(now, then, strict=True) if i < len(before[SCORES])]
        if looked:
            again, there = (list(own) for own in zip(*looked, strict=True))
            (fitted_ER, without_ER), turns_CR = columns[0][:, there], columns[1]
            without_ECR, more_ECR = (f.unsqueeze(1) * turns_CR for f in (without_ER, fitted_ER - without_ER))
            change_EC = scores_EC[again] - before[SCORES][there]
            optimism_EC[again] += more_ECR @ parts(change_EC, without_ECR, more_ECR, together=True)
    kept = torch.tensor([*numbers, *(int(before[NUMBERS][i]) for i in left)], dtype=torch.float64)
    table_NC = torch.cat([optimism_EC, before[OPTIMISM][left]]) if left else optimism_EC
    return {NUMBERS: kept, SCORES: scores_EC, OPTIMISM: table_NC}
