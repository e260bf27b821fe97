"""The basis of gauss-newton: at a refresh it passes training rows through the model, and finds directions by them.

Layers that may be changed are later ones of the model, whose outputs are of the size of the last one's, so that they
may write to the same residual stream. The first look at labelled rows measures the output side, on fewer rows: a second
pass adds random vectors to the outputs of the last layer, which shows the vectors S that raise the score of each class;
a third adds such a vector to the outputs of one layer in each row. Layers at which it acts nearly as at the last one
may be changed, and their inputs are recorded for more rows. Later looks take S and these layers from the one before,
and record inputs alone, unless the labels need a bias still, which S was to give them. `labels` makes directions of the
inputs and errors.

Free text has a regression of its own (`text`), and one direction: all that it found.
"""

import math
from collections.abc import Sequence

import torch

from tezo.directions.bases.basis import DataBasis, Source, StoredTensors, input_size, output_size
from tezo.directions.outputs import Outputs
from tezo.directions.targets import Target
from tezo.newton.labels import LabelledRows, is_biased, look_at_labels
from tezo.newton.look import ClassVectors, Look
from tezo.newton.recording import AddedVectors, recording
from tezo.newton.text import TextRecord, fit_text, recording_text
from tezo.optim.closures import RowOutputs
from tezo.system.errors import RequestError

MOST_ROWS, MOST_LABELLED = 256, 1024
"""Rows of a look, at most; of labelled rows the first look finds the layers that may be changed."""
LEAST_ROWS = 32
SHARE = 8
"""Inputs are kept in half precision, at most this part of the bytes of all layers, from `LEAST_ROWS` rows on."""
LAST_LAYERS = 1 / 2
"""Layers that may be changed, the last ones of the model, as a part of all."""


class ErrorBasis(DataBasis[Look]):
    """Inputs of linear layers that predict the errors of the outputs, and outputs that mend them; see the module."""

    def compute(self, refresh_step: int, source: Source) -> Look:
        if source.rows is None:
            raise RequestError(
                "method.basis: this basis is computed from the outputs of rows, and the closure tells a loss alone; "
                "give one of tezo.closure(model, batch), or rows by optimizer.set_rows."
            )
        vectors = self._measured_before(refresh_step)
        if vectors is None:
            return self._first(refresh_step, source, 0)
        rows = self._record(refresh_step, source, vectors)
        if is_biased(rows.outputs):
            return self._first(refresh_step, source, rows.passes)
        return look_at_labels(rows, vectors, self._targets, self._ranks, rows.passes)

    def read(self, stored: StoredTensors) -> Look:
        return Look.from_tensors(stored, [target.name for target in self._targets])

    def _measured_before(self, refresh_step: int) -> ClassVectors | None:
        """Returns the vectors that raise each class as an earlier look measured them; None: none did."""
        for step in sorted(self._kept, reverse=True):
            known = self._kept[step].class_vectors
            if step < refresh_step and known is not None:
                return ClassVectors(known.vectors_MC.clone(), known.layers)
        return None

    def _first(self, refresh_step: int, source: Source, passes: int) -> Look:
        """Returns a look that measures the output side too, after so many calls of the model."""
        if not self._targets:
            raise RequestError(
                "method.basis: none of the tuned parameters is the weight of a linear layer, whose inputs foretell "
                "errors; choose others with method.targets, or set method.basis=gaussian."
            )
        model = source.model
        like_last = [target for target in self._targets if output_size(target) == output_size(self._targets[-1])]
        tried = like_last[-math.ceil(LAST_LAYERS * len(like_last)) :]
        count = self._rows_to_record(tried, MOST_ROWS)
        rows = _rows(source, refresh_step, count)
        places = rows.places()
        with recording(model, tried, places) as recorded, recording_text(model, tried[-1], places) as text:
            outputs = _finite(rows.outputs())
        if not recorded.inputs:
            raise RequestError(
                "method.basis: no linear layer that is tuned has an input for each token of a row; choose others with "
                "method.targets, or set method.basis=gaussian."
            )
        if outputs.tokens_TC is not None:
            return self._of_text(source, rows, tried[-1], (text, outputs), passes + 2 * len(places))
        if not outputs.shared:
            raise RequestError(
                "method.basis: these rows have options of their own, and what foretells errors is regressed on labels "
                "or tokens; set method.name=head-feedback, or method.basis=gaussian."
            )
        last = tried[[t.name for t in tried].index([*recorded.inputs][-1])]
        added = AddedVectors(model, rows, places, outputs, refresh_step)
        vectors_MC = added.class_vectors(last, recorded.output_size(last.name))
        vectors = added.acting([t for t in tried if t.name in recorded.inputs], vectors_MC)
        found = LabelledRows(recorded, outputs, rows.stepped, 0)
        if len(outputs.labels_T) >= count:  # there are more rows
            found = self._record(refresh_step, source, vectors)
        passes += 3 * len(places) + found.passes
        return look_at_labels(found, vectors, self._targets, self._ranks, passes)

    def _record(self, refresh_step: int, source: Source, vectors: ClassVectors) -> LabelledRows:
        """Returns as many labelled rows as the inputs of these layers may be kept of."""
        layers = [target for target in self._targets if target.name in vectors.layers]
        rows = _rows(source, refresh_step, self._rows_to_record(layers, MOST_LABELLED))
        with recording(source.model, layers, places := rows.places()) as recorded:
            return LabelledRows(recorded, _finite(rows.outputs()), rows.stepped, len(places))

    def _of_text(
        self, source: Source, rows: RowOutputs, target: Target, found: tuple[TextRecord, Outputs], passes: int
    ) -> Look:
        v = {own.name: torch.zeros(input_size(own), self._ranks[own.name]).double() for own in self._targets}
        u_MR, v[target.name] = fit_text(source.model, target, rows, *found, self._ranks[target.name])
        whole_1R = torch.ones(1, max(self._ranks.values()), dtype=torch.float64)
        return Look(inputs=v, outputs={target.name: u_MR}, proposals=whole_1R, passes=passes)

    def _rows_to_record(self, targets: Sequence[Target], most: int) -> int:
        """Returns the number of rows, at most `most`, whose inputs of these layers may be kept."""
        row, every = sum(4 * input_size(target) for target in targets), sum(t.parameter.nbytes for t in self._targets)
        return max(LEAST_ROWS, min(most, every // SHARE // max(1, row)))


def _rows(source: Source, refresh_step: int, count: int) -> RowOutputs:
    assert source.rows is not None
    rows: RowOutputs = source.rows(refresh_step, count)
    return rows


def _finite(outputs: Outputs) -> Outputs:
    """Returns outputs; raises a `FloatingPointError` where their loss is NaN or infinite."""
    loss = outputs.loss()
    if not math.isfinite(loss):
        raise FloatingPointError(loss)
    return outputs
