"""A look: what a refresh of gauss-newton finds out about the model on training rows, as a value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tezo.directions.bases.basis import OUTPUT_SIDE, PROPOSALS, Factors, Predictions, StoredTensors

_VECTORS, _LAYERS = "vectors that raise each class", "whether outputs of each target do"
_CHANGES, _CLASSES = "what columns foretell of rows", "classes of columns"
_SIGNALS, _NO_SIGNAL = "signal of each target", -2.0
"""The names of stored tensors; the last is in the place of a signal that was not measured."""


@dataclass(frozen=True)
class ClassVectors:
    """Vectors by which outputs of some layers raise the score of each class.

    Attributes:
        vectors_MC: S, one vector for each of C classes, float64; added to an output it raises the score by 1.
        layers: names of the layers whose outputs act so.
    """

    vectors_MC: Tensor
    layers: Sequence[str]


@dataclass(frozen=True)
class ColumnPredictions:
    """What the columns of the factors should do to the scores of the E rows of a step.

    Attributes:
        changes_2ER: change along the classes of each column, predicted by regressions with the row, and without it.
        classes_CR: by how much each column raises each of C classes.
    """

    changes_2ER: Tensor
    classes_CR: Tensor


@dataclass(frozen=True, kw_only=True)
class Look(Factors):
    """The factors of all linear layers, and what they were found by.

    `inputs` has all layers in the order of the model; layers that are not changed have zeros.

    Attributes:
        signals: parameter name -> correlation of what its inputs predict with the errors of places that the regression
            has not had; of layers that were regressed.
        class_vectors: of labelled rows; None: the rows are free text.
        columns: what columns predict of the rows of the step; None: it is not known.
    """

    signals: Mapping[str, float] = field(default_factory=dict)
    class_vectors: ClassVectors | None = None
    columns: ColumnPredictions | None = None

    def predictions(self) -> Predictions | None:
        if self.columns is None or self.proposals is None:
            return None
        along_CRJ = self.columns.classes_CR.unsqueeze(-1) * self.proposals.T
        fitted, without = (torch.tensordot(own_ER, along_CRJ, ([1], [1])) for own_ER in self.columns.changes_2ER)
        return Predictions(fitted, without)

    def metrics(self) -> dict[str, Any]:
        return {"signal": {name: round(signal, 3) for name, signal in self.signals.items()}}

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = super().to_tensors()
        signals = [self.signals.get(name, _NO_SIGNAL) for name in self.inputs]
        tensors[_SIGNALS] = torch.tensor(signals, dtype=torch.float64)
        if self.class_vectors is not None:
            chosen = [float(name in self.class_vectors.layers) for name in self.inputs]
            tensors[_VECTORS] = self.class_vectors.vectors_MC
            tensors[_LAYERS] = torch.tensor(chosen, dtype=torch.float64)
        if self.columns is not None:
            tensors[_CHANGES], tensors[_CLASSES] = self.columns.changes_2ER, self.columns.classes_CR
        return tensors

    @classmethod
    def from_tensors(cls, stored: StoredTensors, names: Sequence[str]) -> "Look":
        """Returns the look that was stored as these tensors.

        Args:
            stored: result of `to_tensors`, and the passes.
            names: of all linear layers, in the order of the model.
        """
        tensors, vectors, columns = stored.tensors, None, None
        signals = zip(names, tensors[_SIGNALS].tolist(), strict=True) if _SIGNALS in tensors else ()
        if _VECTORS in tensors:
            chosen = zip(names, tensors[_LAYERS].tolist(), strict=True)
            vectors = ClassVectors(tensors[_VECTORS], [name for name, acts in chosen if acts])
        if _CHANGES in tensors:
            columns = ColumnPredictions(tensors[_CHANGES], tensors[_CLASSES])
        return cls(
            inputs={name: tensors[name] for name in names if name in tensors},
            outputs={name: tensors[name + OUTPUT_SIDE] for name in names if name + OUTPUT_SIDE in tensors},
            proposals=tensors.get(PROPOSALS),
            passes=stored.passes,
            signals={name: signal for name, signal in signals if signal > _NO_SIGNAL},
            class_vectors=vectors,
            columns=columns,
        )
