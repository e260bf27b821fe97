"""Regressions from inputs of layers to the errors of labels, and the meaning of the columns along them.

A pass over P places, rows with options, gives the errors e_p of the outputs there (right minus given) and the inputs
x_p of some layers. A change U diag(c) V^T of a weight can mend the errors only as far as V^T x_p distinguishes them.
For each layer, ridge regression from its inputs to the errors,

    W = X^T (X X^T + lambda I)^-1 E,

gives the inputs that predict the errors best; X and E are less their means over the P places. Inputs at the place
itself and their mean over the tokens that it depends on are regressed apart. The regression of the other places, which
has other means too, predicts for a place, beyond their mean error,

    f_p = P / (P - 1) e_p - alpha_p / (K_pp - 1 / (P lambda)),   K = (X X^T + lambda I)^-1,   alpha = K E.

Its correlation with the errors, the signal, chooses lambda for each layer, and is the layer's weight among all of them.
All layers predict much the same, each with other noise, so that their sum is better than any. B (C, R) are the
leading right singular vectors of that sum.

Directions are proposed along the columns of the factors: each contrast of biases, or of many classes the bias that fits
best, the predictions by inputs at the place, those by means, and, of enough places, both for each column of B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tezo.directions.outputs import Outputs, fitted_bias

RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Candidates for lambda, as parts of the mean of the diagonal of X X^T."""
BIASED = 0.1
"""S is measured anew where a bias for each label would lower the loss by more than this part."""
RANK, MOST_RANK = 16, 64
"""Columns by default, and at most where there are many labels. Chosen by trials that are not committed, on recorded
inputs of training rows of 32 kinds of TREC: of other rows 62, 69 and 71 % were right with 16, 32 and 64 columns and 8
rows of a label, and 70, 77 and 78 % with 16 rows. Of other training rows of examples/routing (eight labels, 8 rows of
each, three seeds, not committed either) the loss was 1.88, 1.80 and 1.78 with one bias, and 1.83, 1.68 and 1.66 with
all."""
PLACES_OF_A_DIRECTION = 16
"""Columns of B have directions of their own where there are so many places for each direction. Chosen by trials that
are not committed, on recorded inputs of training rows: with 8 rows of a label the loss of other rows of TREC was 0.98
without them and 1.19 with them, with 64 rows 0.486 and 0.470."""


def rank_for(labels: int) -> int:
    """Returns the number of columns by default, from `RANK` to `MOST_RANK`.

    Each contrast of so many labels has one for inputs of each kind, and one for a bias; where these would be more than
    `MOST_RANK`, one bias is for all.
    """
    count = labels - 1
    return min(MOST_RANK, max(RANK, 3 * count if 3 * count <= MOST_RANK else 2 * count + 1))


def is_biased(outputs: Outputs) -> bool:
    """Returns whether a bias for each label would lower the loss by more than `BIASED` of it."""
    scores_TC = outputs.scores_TC.detach().double().cpu() + fitted_bias(outputs)
    return replace(outputs, scores_TC=scores_TC, labels_T=outputs.labels_T.cpu()).loss() < (1 - BIASED) * outputs.loss()


def contrasts(classes: int) -> Tensor:
    """Returns orthonormal contrasts of classes, (C, C - 1)."""
    found: Tensor = torch.linalg.qr(torch.eye(classes, dtype=torch.float64) - 1 / classes).Q
    return found[:, : classes - 1]


@dataclass(frozen=True)
class Layout:
    """The meaning of the columns: R contrasts predicted by inputs of each kind, then biases.

    Attributes:
        contrasts: R.
        kinds: of inputs: at the place, and their mean.
        biases: columns with a constant input, in the last layer alone, at most a third of all: all contrasts of
            classes, or else the bias that fits best, or none of fewer than three columns.
        are_apart: whether each column of B has a direction of its own, beside their sum.
    """

    contrasts: int
    kinds: int
    biases: int
    are_apart: bool

    @classmethod
    def of(cls, classes: int, kinds: int, rank: int, places: int) -> "Layout":
        """Returns the layout of the columns of this rank, of regressions on so many places."""
        biases = classes - 1 if classes - 1 <= rank // 3 else min(1, rank // 3)
        count = max(1, min(classes - 1, (rank - biases) // kinds, places))
        enough = places >= PLACES_OF_A_DIRECTION * (biases + kinds + count)
        return cls(count, kinds, biases, count > 1 and enough)

    def biases_of(self, outputs: Outputs) -> Tensor:
        """Returns by how much each column with a constant input raises each class, (C, biases) in float64."""
        classes = outputs.scores_TC.shape[1]
        if self.biases == classes - 1:
            return contrasts(classes)
        return functional.normalize(fitted_bias(outputs), dim=0).unsqueeze(1)

    def columns(self, kind: int) -> slice:
        """Returns the columns that inputs of a kind predict."""
        return slice(kind * self.contrasts, (kind + 1) * self.contrasts)

    @property
    def bias(self) -> slice:
        """The columns with a constant input."""
        return slice(self.kinds * self.contrasts, self.kinds * self.contrasts + self.biases)

    def proposals(self, weights_R: Tensor, rank: int) -> Tensor:
        """Returns the coefficients of the proposed directions, (J, rank); contrasts have these weights in a sum."""
        rows = []
        for bias in range(self.bias.start, self.bias.stop):
            rows.append(functional.one_hot(torch.tensor(bias), rank).double())
        for kind in range(self.kinds):
            rows.append(torch.zeros(rank, dtype=torch.float64))
            rows[-1][self.columns(kind)] = weights_R
        for contrast in range(self.contrasts if self.are_apart else 0):
            rows.append(torch.zeros(rank, dtype=torch.float64))
            rows[-1][[kind * self.contrasts + contrast for kind in range(self.kinds)]] = 1.0
        return torch.stack(rows)


@dataclass(frozen=True)
class Regression:
    """The regression from inputs to errors.

    Attributes:
        x_PI: inputs, less their mean; float32.
        w_IE: W, float32.
        unseen_PE: its prediction for each place by the regression without that place.
        signal: their correlation with the errors.
    """

    x_PI: Tensor
    w_IE: Tensor
    unseen_PE: Tensor
    signal: float

    @property
    def weight(self) -> float:
        """In a sum over layers: the signal, or none where there is no signal."""
        return max(self.signal, 0.0)

    def along(self, turns_ER: Tensor) -> Tensor:
        """Returns columns W B with V^T x of mean square 1, (I, R) in float64."""
        return (self.w_IE @ turns_ER.float()).double() / self._fitted(turns_ER)[1]

    def predicted(self, turns_ER: Tensor) -> Tensor:
        """Returns the predictions of these columns at each place, by the regression with and without it, (2, P, R)."""
        fitted_PR, size_R = self._fitted(turns_ER)
        return torch.stack([fitted_PR, self.unseen_PE @ turns_ER]) / size_R

    def _fitted(self, turns_ER: Tensor) -> tuple[Tensor, Tensor]:
        fitted_PR = (self.x_PI @ (self.w_IE @ turns_ER.float())).double()
        return fitted_PR, fitted_PR.square().mean(0).sqrt().clamp_min(1e-30)


def regress(inputs: Sequence[Tensor], error_PE: Tensor) -> list[Regression]:
    """Returns the regressions from inputs of each kind, (P, I), to errors, each with the lambda of the best signal."""
    error_PE = error_PE - error_PE.mean(0)
    return [max(_with_ridges(x_PI.float() - x_PI.float().mean(0), error_PE), key=_signal) for x_PI in inputs]


def _signal(found: Regression) -> float:
    return found.signal


def _with_ridges(x_PI: Tensor, error_PE: Tensor) -> list[Regression]:
    gram_PP = (x_PI @ x_PI.T).double()
    mean, count = float(gram_PP.diagonal().mean()), len(gram_PP)
    found = []
    for ridge in RIDGES:
        added = torch.full((count,), ridge * mean + 1e-12, dtype=gram_PP.dtype)
        inverse_PP = torch.cholesky_inverse(torch.linalg.cholesky(gram_PP + torch.diag(added)))
        alpha_PE = inverse_PP @ error_PE
        own_P1 = (inverse_PP.diagonal() - 1 / (count * added[0])).clamp_min(1e-300).unsqueeze(1)
        unseen_PE = error_PE * (count / max(1, count - 1)) - alpha_PE / own_P1
        size = torch.linalg.vector_norm(unseen_PE) * torch.linalg.vector_norm(error_PE)
        signal = float((unseen_PE * error_PE).sum() / size.clamp_min(1e-30))
        found.append(Regression(x_PI, x_PI.T @ alpha_PE.float(), unseen_PE, signal))
    return found


def common(found: Sequence[Regression], count: int) -> tuple[Tensor, Tensor]:
    """Returns (B (E, R), singular values as parts of the largest) of the sum of all predictions for unseen places."""
    sizes = [part.unseen_PE.square().mean().sqrt().clamp_min(1e-30) for part in found]
    together_PE = sum(part.weight * part.unseen_PE / size for part, size in zip(found, sizes, strict=True))
    assert isinstance(together_PE, Tensor)
    _, singular_E, turns_EE = torch.linalg.svd(together_PE, full_matrices=False)
    weights_R = singular_E[:count] / singular_E[0].clamp_min(1e-30)
    return turns_EE[:count].T, weights_R
