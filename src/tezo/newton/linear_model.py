"""The scores of rows as a linear function of coefficients, and the coefficients with the lowest loss of other rows.

With the slopes F of the scores z along K directions, (T, C, K), the loss of z + F a is convex in a:

    a = argmin  sum_t cross entropy(z_t + (F a)_t, label_t) + lambda |a|^2 / (2 s^2),   s^-2 = K mean F^2,

with s the size of coefficients that change scores by about 1. Newton's method finds the minimum. lambda is chosen by
cross-validation over the rows; a fit to a part of them has this part of lambda.

Directions found by a regression on these rows promise too much for them. Where the regression predicts
the changes of scores P, and P' if each row had been left out of it, F is replaced by

    F' = F - r (P - P'),   s, r = argmin |F - s P' - r (P - P')|^2,

for each direction, with the means over rows and over classes taken off all three, and r at least 0. That part of F, its
optimism (Efron 2004), does not hold for other rows. Coefficients are fitted to z + F' a, and validated by it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tezo.directions.bases.basis import Predictions
from tezo.directions.outputs import Outputs, change

RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Candidates for lambda."""
FOLDS = 4
"""Parts of the examples for cross-validation."""
PARTS = tuple(part / 20 for part in range(1, 21))
"""Parts of a step that are compared."""
NEWTON_STEPS, NEWTON_TOLERANCE = 30, 1e-7


@dataclass(frozen=True)
class Candidate:
    """The step for one lambda.

    Attributes:
        ridge: lambda.
        coefficients: of the directions.
        promised: loss by the linear model, of the rows that they were fitted to.
        validated: by F', of rows that coefficients were not fitted to; of all where there is one example.
    """

    ridge: float
    coefficients: list[float]
    promised: float
    validated: float


def without_optimism(slopes_TCK: Tensor, outputs: Outputs, predictions: Predictions | None) -> Tensor:
    """Returns F' (T, C, K), the slopes if directions had been found without each row; see the module.

    Args:
        slopes_TCK: F.
        outputs: at W.
        predictions: of the first E examples; directions were not found by the others. None: by none of them.
    """
    if predictions is None or not len(predictions.fitted_ECJ):
        return slopes_TCK
    example_T, count = outputs.example_T.cpu(), slopes_TCK.shape[-1]
    known_T = example_T < len(predictions.fitted_ECJ)
    fitted_TCK, without_TCK = (
        part[example_T[known_T], :, :count] for part in (predictions.fitted_ECJ, predictions.without_ECJ)
    )
    found_TCK, optimism_TCK = slopes_TCK.clone(), fitted_TCK - without_TCK
    compared = (found_TCK[known_T], without_TCK, optimism_TCK)
    slopes, *terms = (f - f.mean(0) - f.mean(1, keepdim=True) + f.mean((0, 1)) for f in compared)
    y_KX1 = slopes.movedim(2, 0).flatten(1).unsqueeze(-1)
    x_KX2 = torch.stack(terms, -1).movedim(2, 0).flatten(1, 2)
    parts_K2 = (torch.linalg.pinv(x_KX2.mT @ x_KX2, hermitian=True) @ (x_KX2.mT @ y_KX1)).squeeze(-1)
    found_TCK[known_T] -= parts_K2[:, 1].clamp_min(0) * optimism_TCK
    return found_TCK


class LinearModel:
    """The scores of rows as a linear function of the coefficients of K directions.

    Args:
        outputs: at W.
        slopes_TCK: their derivatives along each direction, float64 on the CPU.
        unseen_TCK: the same if no direction had been found by these rows, by which coefficients are chosen.

    Attributes:
        outputs: at W.
        loss: at W.
        count: K.
    """

    def __init__(self, outputs: Outputs, slopes_TCK: Tensor, unseen_TCK: Tensor) -> None:
        self.outputs, self.loss, self.count = outputs, outputs.loss(), slopes_TCK.shape[-1]
        self._z_TC = outputs.scores_TC.double().cpu()
        self._labels_T, self._example_T = outputs.labels_T.cpu(), outputs.example_T.cpu()
        size = float(slopes_TCK.square().mean().sqrt()) * math.sqrt(self.count)
        self._unit = 1 / max(size, 1e-300)
        self._slopes_TCK, self._unseen_TCK = slopes_TCK * self._unit, unseen_TCK * self._unit

    def best_part(self, step: Candidate, moved: Outputs) -> float:
        """Returns the part of a step after which the loss is lowest, by scores that are quadratic along it."""
        along_TC = self._slopes_TCK @ (torch.tensor(step.coefficients, dtype=torch.float64) / self._unit)
        bend_TC = change(moved, self.outputs) - along_TC

        def loss(part: float) -> float:
            scores_TC = self._z_TC + part * along_TC + part**2 * bend_TC
            return float(functional.cross_entropy(scores_TC, self._labels_T))

        return min(PARTS, key=loss)

    def best(self) -> Candidate:
        """Returns the step with the lowest validated loss."""
        return min(self.candidates(), key=lambda candidate: candidate.validated)

    def candidates(self) -> list[Candidate]:
        """Returns the steps for all `RIDGES`."""
        _, example_T = torch.unique(self._example_T, return_inverse=True)
        everything, folds = torch.ones_like(example_T, dtype=torch.bool), example_T % FOLDS
        parts = [folds == fold for fold in range(FOLDS) if bool((folds == fold).any())]
        start: list[Tensor] = [torch.zeros(self.count, dtype=torch.float64)] * (1 + len(parts))
        found = []
        for ridge in sorted(RIDGES, reverse=True):  # each starts from the shorter step before
            start[0] = self._solve(everything, ridge, start[0])
            promised, validated = self._loss(self._slopes_TCK, everything, start[0]), 0.0
            for i, part in enumerate(parts if len(parts) > 1 else [], start=1):
                share = float(part.double().mean())
                start[i] = self._solve(~part, ridge * (1 - share), start[i])
                validated += share * self._loss(self._unseen_TCK, part, start[i])
            if len(parts) == 1:
                validated = self._loss(self._unseen_TCK, everything, start[0])
            found.append(Candidate(ridge, (start[0] * self._unit).tolist(), promised, validated))
        return found[::-1]

    def _loss(self, slopes_TCK: Tensor, places_T: Tensor, a_K: Tensor) -> float:
        scores_TC = self._z_TC[places_T] + slopes_TCK[places_T] @ a_K
        return float(functional.cross_entropy(scores_TC, self._labels_T[places_T]))

    def _solve(self, places_T: Tensor, ridge: float, a_K: Tensor) -> Tensor:
        """Returns the minimum over these places, in units of `_unit`: Newton's method, with steps halved as needed."""
        z_TC, f_TCK, labels_T = self._z_TC[places_T], self._unseen_TCK[places_T], self._labels_T[places_T]

        def value(a_K: Tensor) -> float:
            loss = functional.cross_entropy(z_TC + f_TCK @ a_K, labels_T, reduction="sum")
            return float(loss + ridge * a_K.square().sum() / 2)

        now = value(a_K)
        for _ in range(NEWTON_STEPS):
            p_TC = (z_TC + f_TCK @ a_K).softmax(1)
            error_TC = p_TC - functional.one_hot(labels_T, p_TC.shape[1])
            gradient_K = torch.einsum("tc,tck->k", error_TC, f_TCK) + ridge * a_K
            # sum_t F_t^T (diag(p_t) - p_t p_t^T) F_t
            weighted_XK = (p_TC.sqrt().unsqueeze(-1) * f_TCK).flatten(0, 1)
            mean_TK = torch.einsum("tc,tck->tk", p_TC, f_TCK)
            hessian_KK = weighted_XK.T @ weighted_XK - mean_TK.T @ mean_TK
            hessian_KK.diagonal().add_(ridge)
            step_K = torch.linalg.solve(hessian_KK, gradient_K)
            length = 1.0
            while (after := value(a_K - length * step_K)) > now and length > 1e-4:
                length /= 2
            if after >= now:
                break
            a_K, now = a_K - length * step_K, after
            if float(step_K.abs().max()) < NEWTON_TOLERANCE:
                break
        return a_K
