"""A look, all that one refresh of gauss-newton finds on training rows: directions, and how they are found.

Layers that may be changed are later ones of the model, whose outputs are of the size of the last one's, so that they
may write to the same residual stream. The first look at labelled rows finds the output side, on fewer rows: the vectors
S that raise the score of each class. Where one look has all rows, labels differ in one token each and the last blocks
can be rebuilt, S of each layer is computed from one pass (`class_vectors`), and others confirm that it acts. Else it is
measured: a second pass adds random vectors to the outputs of the last layer, and a third adds S to those of one layer
in each row. Layers at which it has at least 0.3 of its effect at the last one may be changed. Further passes measure S
at `DEPTHS` of them, once for the outputs at the place and once for those at all other tokens, since a vector that acts
at the end of the model does little in its middle, and next to nothing at other tokens there. Each layer has S of the
nearest depth. Then inputs are recorded for more rows. Later looks take S and these layers from the one before, and
record inputs alone, unless the labels need a bias still, which S was to give them.

Regressions (`labels`) predict the errors of the outputs from the inputs x of each layer, less their projection on the
averages of these inputs. So V^T x = 0 on average: a direction moves rows apart, and no class as a whole. With B (C, R)
the contrasts of classes that they predict best, W (I, C) the regression of a layer, and w its weight among all layers,

    U = S B,   V = w W B,   each column scaled so that V^T x has mean square w^2,   w ~ signal / |S|^2:

along a column, all layers together add their prediction to the scores, with size 1, and change outputs more where this
moves the scores further. The last layer also has constant inputs, V^T x about 1, by which labels get a bias. So columns
mean the same in all layers, and directions along them are proposed. The change that a column predicts for each row of
the step, by regressions with and without that row, is kept beside it: a direction promises more of these rows than it
does for others.

Free text has one direction: all that the last blocks have learnt in a `sweep` over batches, or, where they cannot be
rebuilt or all rows are the same ones again, all that a regression of the last layer (`text`) has found.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tezo.directions.bases.basis import (
    OUTPUT_SIDE,
    PROPOSALS,
    DataBasis,
    Factors,
    Predictions,
    Source,
    StoredTensors,
    input_size,
    output_size,
)
from tezo.directions.outputs import Outputs, errors
from tezo.directions.targets import ALL_LINEAR, Target, select_targets
from tezo.newton.class_vectors import VECTOR_ROWS, computed_vectors
from tezo.newton.labels import Layout, common, is_biased, regress
from tezo.newton.last_blocks import NotRebuiltError, name_of
from tezo.newton.recording import AddedVectors, ClassVectors, InputRecorder, finite
from tezo.newton.sweep import BATCHES, ROWS, blocks_to_sweep, sweep
from tezo.newton.text import Pair, Seen, fit_text
from tezo.optim.closures import RowOutputs
from tezo.system.errors import RequestError

logger = logging.getLogger(__name__)

MOST_ROWS, MOST_LABELLED = 256, 1024
"""Rows by which the first look finds S and the layers that may be changed, and rows whose inputs are kept, at most."""
LEAST_ROWS = 32
SHARE = 8
"""Inputs are kept in half precision, at most this part of the bytes of all layers, from `LEAST_ROWS` rows on."""
LEAST_BLOCK_BYTES = 1 << 28
"""Inputs of rebuilt blocks may take as many bytes as all layers, and at least so many."""
DEPTHS = 4
"""Layers at which vectors that raise each class are measured, at most. Our choice."""
LAST_LAYERS = 1 / 2
"""Layers that may be changed, the last ones of the model, as a part of all."""

_VECTORS, _LAYERS, _NO_VECTORS = "vectors that raise each class", "which of them outputs of each target are", -1
_CHANGES, _CLASSES = "what columns foretell of rows", "classes of columns"
_SIGNALS, _NO_SIGNAL = "signal of each target", -2.0
"""The names of stored tensors; the last is in the place of a signal that was not measured."""


@dataclass(frozen=True)
class ColumnPredictions:
    """The changes that the columns of the factors should make to the scores of the E rows of a step.

    Attributes:
        changes_2ER: change along the classes of each column, predicted by regressions with the row, and without it.
        classes_CR: by how much each column raises each of C classes.
    """

    changes_2ER: Tensor
    classes_CR: Tensor


@dataclass(frozen=True, kw_only=True)
class Look(Factors):
    """The factors of all linear layers, and the measurements behind them.

    `inputs` has all layers in the order of the model; layers that are not changed have zeros.

    Attributes:
        signals: parameter name -> correlation of the prediction from its inputs with the errors of places that the
            regression has not had; of layers that were regressed.
        class_vectors: of labelled rows; None: the rows are free text.
        columns: predictions for the rows of the step; None: they are not known.
    """

    signals: Mapping[str, float] = field(default_factory=dict)
    class_vectors: ClassVectors | None = None
    columns: ColumnPredictions | None = None

    def predictions(self) -> Predictions | None:
        if self.columns is None or self.proposals is None:
            return None
        along_CRJ = self.columns.classes_CR.unsqueeze(-1) * self.proposals.T
        fitted, without = (
            torch.tensordot(changes_ER, along_CRJ, ([1], [1])) for changes_ER in self.columns.changes_2ER
        )
        return Predictions(fitted, without)

    def metrics(self) -> dict[str, Any]:
        return {"signal": {name: round(signal, 3) for name, signal in self.signals.items()}}

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = super().to_tensors()
        signals = [self.signals.get(name, _NO_SIGNAL) for name in self.inputs]
        tensors[_SIGNALS] = torch.tensor(signals, dtype=torch.float64)
        if self.class_vectors is not None:
            vectors = self.class_vectors.vectors
            distinct = [*{id(each): each for each in vectors.values()}.values()]
            places = {id(each): place for place, each in enumerate(distinct)}
            tensors[_VECTORS] = torch.stack(distinct)
            chosen = [places[id(vectors[name])] if name in vectors else _NO_VECTORS for name in self.inputs]
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
            distinct = [*tensors[_VECTORS]]
            vectors = ClassVectors({name: distinct[int(place)] for name, place in chosen if place != _NO_VECTORS})
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


@dataclass(frozen=True)
class LabelledRows:
    """Labelled rows that were passed through the model.

    Attributes:
        recorded: inputs of layers there.
        outputs: of the rows.
        stepped: number of examples, the first ones, that are rows of the step; None: all.
        passes: calls of the model that it took.
    """

    recorded: InputRecorder
    outputs: Outputs
    stepped: int | None
    passes: int


class ErrorBasis(DataBasis[Look]):
    """Inputs of linear layers that predict the errors of the outputs, and outputs that mend them; see the module."""

    watches = True

    def compute(self, refresh_step: int, source: Source) -> Look:
        if source.rows is None:
            raise RequestError(
                "method.basis: this basis is computed from the outputs of rows, and the closure returns only a loss; "
                "give one of tezo.closure(model, batch), or rows by optimizer.set_rows."
            )
        vectors = self._measured_before(refresh_step)
        if vectors is None:
            return self._first(refresh_step, source, 0)
        rows = self._record(refresh_step, source, vectors)
        # an engine that is another one by now may show other layers
        if is_biased(rows.outputs) or not vectors.vectors.keys() <= rows.recorded.found.keys():
            return self._first(refresh_step, source, rows.passes)
        return look_at_labels(rows, vectors, self._targets, self._ranks, rows.passes)

    def collecting_bytes(self, targets: Sequence[Target], ranks: Mapping[str, int]) -> int:
        del ranks
        if not targets:
            return 0
        layers = may_change(targets)
        return rows_to_record(layers, targets, MOST_LABELLED) * _row_bytes(layers)

    def read(self, stored: StoredTensors) -> Look:
        return Look.from_tensors(stored, [target.name for target in self._targets])

    def _measured_before(self, refresh_step: int) -> ClassVectors | None:
        """Returns the vectors that raise each class as an earlier look measured them; None: none did."""
        for step in sorted(self._kept, reverse=True):
            known = self._kept[step].class_vectors
            if step < refresh_step and known is not None:
                return known
        return None

    def _first(self, refresh_step: int, source: Source, passes: int) -> Look:
        """Returns a look that measures the output side too, after so many calls of the model."""
        if not self._targets:
            raise RequestError(
                "method.basis: none of the tuned parameters is the weight of a linear layer, whose inputs predict "
                "errors; choose others with method.targets, or set method.basis=gaussian."
            )
        model = source.model
        tried = may_change(self._targets)
        count = rows_to_record(tried, self._targets, MOST_ROWS)
        rows = _rows(source, refresh_step, count)
        if rows.are_texts:
            return self._of_text(refresh_step, source, rows, tried[-1])
        recorded = InputRecorder(tried)
        with rows.watching(model, recorded):
            outputs = finite(rows.outputs())
        if not recorded.found:
            raise RequestError(
                "method.basis: no linear layer that is tuned has an input for each token of a row; choose others with "
                "method.targets, or set method.basis=gaussian."
            )
        if not outputs.shared:
            raise RequestError(
                "method.basis: these rows have per-row options, and errors are predicted for labels or tokens; "
                "set method.name=head-feedback, or method.basis=gaussian."
            )
        found = LabelledRows(recorded, outputs, rows.stepped, 0)
        are_all = len(outputs.labels_T) < count
        # computed vectors have none for other tokens; with many rows of TREC, by a trial, measured ones of both led
        if are_all:
            computed = computed_vectors(model, _rows(source, refresh_step, VECTOR_ROWS), tried, refresh_step)
            passes += computed.passes
            if computed.vectors is not None:
                passes += recorded.passes
                return look_at_labels(found, computed.vectors, self._targets, self._ranks, passes)
        last = tried[[t.name for t in tried].index([*recorded.found][-1])]
        added = AddedVectors(model, rows, outputs, refresh_step)
        layers = [t for t in tried[: tried.index(last) + 1] if t.name in recorded.found]
        vectors = added.class_vectors(layers, recorded.output_size, DEPTHS)
        if not are_all:
            found = self._record(refresh_step, source, vectors)
        passes += added.passes + recorded.passes + found.passes
        return look_at_labels(found, vectors, self._targets, self._ranks, passes)

    def _record(self, refresh_step: int, source: Source, vectors: ClassVectors) -> LabelledRows:
        """Returns as many labelled rows as the inputs of these layers may be kept of."""
        layers = [target for target in self._targets if target.name in vectors.layers]
        rows = _rows(source, refresh_step, rows_to_record(layers, self._targets, MOST_LABELLED))
        recorded = InputRecorder(layers)
        with rows.watching(source.model, recorded):
            outputs = finite(rows.outputs())
        return LabelledRows(recorded, outputs, rows.stepped, recorded.passes)

    def _of_text(self, refresh_step: int, source: Source, rows: RowOutputs, target: Target) -> Look:
        def of_batch(number: int) -> RowOutputs:
            return _rows(source, refresh_step * BATCHES + number, ROWS)

        every = select_targets(source.model, (ALL_LINEAR,))
        budget = max(LEAST_BLOCK_BYTES, sum(each.parameter.nbytes for each in every))
        blocks = blocks_to_sweep(every, target, of_batch(0), budget) if source.varied else []
        try:
            if blocks:
                found, calls = sweep(source.model, target, blocks, of_batch, self._ranks, refresh_step)
                return look_along_one(found, self._targets, self._ranks, calls)
        except NotRebuiltError as error:
            logger.info("Free text changes the last layer alone: %s.", error)
        seen = [Seen.of(source.model, part, [name_of(target)]) for part in (rows, rows.held_out) if part is not None]
        pair, more = fit_text(source.model, target, seen, self._ranks[target.name])
        passes = more + sum(len(part.rows.places()) for part in seen)
        return look_along_one({target.name: pair}, self._targets, self._ranks, passes)


def look_along_one(found: Mapping[str, Pair], targets: Sequence[Target], ranks: Mapping[str, int], passes: int) -> Look:
    """Returns the look with these factors, and one direction: all of them.

    Args:
        found: parameter name -> (U, V) of layers; others do not change.
        targets: weights of all linear layers that are tuned.
        ranks: parameter name -> rank.
        passes: calls of the model that the factors took.
    """
    v = {each.name: torch.zeros(input_size(each), ranks[each.name], dtype=torch.float64) for each in targets}
    v |= {name: v_IR for name, (_, v_IR) in found.items()}
    u = {name: u_MR for name, (u_MR, _) in found.items()}
    whole_1R = torch.ones(1, max(ranks.values()), dtype=torch.float64)
    return Look(inputs=v, outputs=u, proposals=whole_1R, passes=passes)


def may_change(targets: Sequence[Target]) -> list[Target]:
    """Returns the layers that a look may change, of all that are tuned."""
    like_last = [target for target in targets if output_size(target) == output_size(targets[-1])]
    return like_last[-math.ceil(LAST_LAYERS * len(like_last)) :]


def rows_to_record(layers: Sequence[Target], every: Sequence[Target], most: int) -> int:
    """Returns the number of rows, at most `most`, whose inputs of these layers may be kept."""
    bytes_of_all = sum(target.parameter.nbytes for target in every)
    return max(LEAST_ROWS, min(most, bytes_of_all // SHARE // max(1, _row_bytes(layers))))


def _row_bytes(layers: Sequence[Target]) -> int:
    return sum(4 * input_size(target) for target in layers)  # two inputs of each, in half precision


def _rows(source: Source, refresh_step: int, count: int) -> RowOutputs:
    assert source.rows is not None
    rows: RowOutputs = source.rows(refresh_step, count)
    return rows


def look_at_labels(
    rows: LabelledRows, vectors: ClassVectors, targets: Sequence[Target], ranks: Mapping[str, int], passes: int
) -> Look:
    """Returns the look at labelled rows; only layers of `vectors` are changed.

    Args:
        rows: with the inputs of these layers.
        vectors: that raise each class.
        targets: weights of all linear layers, in the order of the model.
        ranks: parameter name -> rank.
        passes: calls of the model that the look took in all.
    """
    outputs, error_TC = rows.outputs, errors(rows.outputs)
    classes, inputs = error_TC.shape[1], {name: rows.recorded.found[name] for name in vectors.layers}
    distinct = {id(each): each for each in inputs.values()}  # layers share inputs
    regressions = {
        key: regress(each.varying()[: vectors.kinds], error_TC[each.places()]) for key, each in distinct.items()
    }
    found = {name: regressions[id(each)] for name, each in inputs.items()}
    every = [part for parts in found.values() for part in parts]
    last, most = vectors.layers[-1], max(ranks.values())
    layout = Layout.of(
        classes,
        len(found[last]),
        min(ranks[name] for name in vectors.layers),
        min(len(part.unseen_PE) for part in every),
    )
    turns_CR, weights_R = common(every, layout.contrasts)
    weights = {
        name: [part.weight * reach for part, reach in zip(parts, vectors.reach(name).tolist(), strict=True)]
        for name, parts in found.items()
    }
    totals = [sum(own[kind] for own in weights.values()) or 1.0 for kind in range(layout.kinds)]
    changes_2ER = torch.zeros(2, len(error_TC), most, dtype=torch.float64)
    classes_CR = torch.zeros(classes, most, dtype=torch.float64)
    for kind in range(layout.kinds):
        classes_CR[:, layout.columns(kind)] = turns_CR
    v, u = {}, {}
    for target in targets:
        name, rank = target.name, ranks[target.name]
        v[name] = torch.zeros(input_size(target), rank, dtype=torch.float64)
        if name not in found:
            continue
        u[name] = torch.zeros(output_size(target), rank, dtype=torch.float64)
        for kind, part in enumerate(found[name]):
            columns, weight = layout.columns(kind), weights[name][kind] / totals[kind]
            v[name][:, columns] = weight * part.along(turns_CR)
            u[name][:, columns] = vectors.vectors[name][kind] @ turns_CR
            examples_P = outputs.example_T.cpu()[inputs[name].places()]
            changes_2ER[:, examples_P, columns] += weight * part.predicted(turns_CR)
        if name == last and layout.biases:
            v[name][:, layout.bias] = inputs[name].constant().unsqueeze(1)
            u[name][:, layout.bias] = vectors.vectors[name][0] @ layout.biases_of(outputs)
    return Look(
        inputs=v,
        outputs=u,
        proposals=layout.proposals(weights_R, most),
        passes=passes,
        signals={name: max(part.signal for part in parts) for name, parts in found.items()},
        class_vectors=vectors,
        columns=ColumnPredictions(changes_2ER[:, : rows.stepped], classes_CR),
    )
