"""A basis computed from data: inputs that foretell what the outputs are wrong by, and outputs that mend it.

A pass over P places, rows with options, gives the errors e_p of the outputs there (right minus said) and the inputs x_p
of linear layers: of the later ones of the model, whose outputs are of the size of the last one's, so that they may
write to the same stream. A change U diag(c) V^T of a weight can mend the errors only as far as V^T x_p tells them
apart. For each layer ridge regression from its inputs to the errors,

    W = X^T (X X^T + lambda I)^-1 E,

gives what foretells the errors best; inputs at the place itself and their mean over the tokens before are regressed
apart. What the regression says of places that it has not seen is known in closed form,

    f_p = e_p - alpha_p / K_pp,   K = (X X^T + lambda I)^-1,   alpha = K E.

Its correlation with the errors, the signal, chooses lambda for each layer, and is the layer's weight among all of them.
All foretell much the same, each with noise of its own, so that their sum is better than any.

On rows with labels, the output side is measured first, on fewer rows. A second pass adds a random vector n_p to the
outputs of the last layer in the row of each example, and the change d_p of the scores (C classes, less their mean)
shows the vectors that raise each:

    S = N^T (N N^T + mu I)^-1 D,   (M, C).

A third pass adds such a vector to the outputs of one layer in each row; those at which it acts nearly as at the last
layer may be changed, and their inputs are kept for more rows. Later steps take S and these layers as they were found,
and look at inputs alone, unless the labels need a bias still, which S was to give them. With B (C, R) the leading right
singular vectors of the sum of all f, and w the signal of a layer as a part of the sum of those of all layers,

    U = S B,   V = w W B,   each column scaled so that V^T x has mean square w^2:

along a column, all layers together add to the scores what they foretell, with size 1. The last layer also has constant
inputs, V^T x about 1, by which labels get a bias. So columns mean the same in all layers, and directions along them are
proposed: each contrast of biases, all that inputs at the place foretell, all that means foretell, and both for each
column of B. What a column foretells of each row, with and without that row in the regressions, is kept beside it: what
a direction promises of these rows is more than it does for others (`Basis.foretold`).

Free text has a regression of its own (`readout`), and one direction: all that it found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.bases.basis import OUTPUT_SIDE, CollectedBasis, CollectedFactors, Foretold, RowsOf, input_size
from tezo.directions.outputs import Outputs, Rows, errors, fitted_bias
from tezo.directions.targets import Target
from tezo.newton.recording import Nudges, Seen, output_size, recording
from tezo.newton.text import Ends, read_text, recording_ends
from tezo.system.errors import RequestError

MOST_ROWS, MOST_LABELLED = 256, 1024
"""Rows that are looked at, at most; of labelled rows the first finds the layers that may be changed."""
LEAST_ROWS = 32
SHARE = 8
"""Inputs are kept in half precision, at most this part of the bytes of all layers, from `LEAST_ROWS` rows on."""
RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Candidates for lambda, as parts of the mean of the diagonal of X X^T."""
BIASED = 0.1
"""S is measured anew where a bias for each label would lower the loss by more than this part."""
LAST_LAYERS = 1 / 2
"""Layers that may be changed, the last ones of the model, as a part of all."""
STREAM, WRITERS = "vectors that raise each class", "whether outputs of each target do"
PROPOSED = "coefficients of proposed directions"
FORETOLD, TURNS = "what columns foretell of rows", "classes of columns"
SIGNAL, NO_SIGNAL = "signal of each target", -2.0
"""The names under which S, the layers that raise classes, the coefficients of directions, what columns foretell
(2, E, R) and of which classes (C, R), and signals are kept with the factors; the last is in place of a signal that was
not measured."""


class ErrorBasis(CollectedBasis):
    """Inputs of linear layers that foretell the errors of the outputs, and outputs that mend them; see the module.

    Attributes:
        signal: parameter name -> correlation with the errors of unseen places, of the last refresh.
    """

    both_sides = True

    def __init__(self) -> None:
        super().__init__()
        self._source: tuple[nn.Module, RowsOf] | None = None
        self.signal: dict[str, float] = {}

    def set_rows(self, model: nn.Module, rows: RowsOf) -> None:
        self._source = model, rows

    @property
    def told(self) -> dict[str, Any]:
        newest = self._collected[max(self._collected)].factors.get(SIGNAL) if self._collected else None
        if newest is None:
            return {}
        signals = zip(self._targets, newest.tolist(), strict=True)
        return {"signal": {target.name: round(own, 3) for target, own in signals if own > NO_SIGNAL}}

    def proposed(self, refresh_step: int) -> Tensor | None:
        return self.collected(refresh_step).factors.get(PROPOSED)

    def foretold(self, refresh_step: int) -> Foretold | None:
        factors = self.collected(refresh_step).factors
        if FORETOLD not in factors:
            return None
        along_CRJ = factors[TURNS].unsqueeze(-1) * factors[PROPOSED].T
        fitted, without = (torch.tensordot(own_ER, along_CRJ, ([1], [1])) for own_ER in factors[FORETOLD])
        return Foretold(fitted, without)

    def collect(self, refresh_step: int) -> CollectedFactors:
        if self._source is None:
            raise RequestError(
                "method.basis: this basis is computed from the outputs of rows, and the closure tells a loss alone; "
                "give one of tezo.closure(model, batch), or rows by optimizer.set_rows."
            )
        model, rows_of = self._source
        measured, passes = self._measured(refresh_step), 0
        if measured is not None:
            look = self._look_at_labels(model, rows_of, refresh_step, measured[0])
            passes = look.passes
        if measured is None or is_biased(look.outputs):
            factors, more = self._first_look(model, rows_of, refresh_step)
            passes += more
        else:
            factors = self._of_labels(look, *measured)
        signals = [self.signal.get(target.name, NO_SIGNAL) for target in self._targets]
        return CollectedFactors(factors | {SIGNAL: torch.tensor(signals, dtype=torch.float64)}, passes)

    def _measured(self, refresh_step: int) -> tuple[list[str], Tensor] | None:
        """Returns (layers whose outputs raise labels, S) as measured before an earlier step; None: they were not."""
        for step in sorted(self._collected, reverse=True):
            factors = self._collected[step].factors
            if step < refresh_step and STREAM in factors:
                chosen = zip(self._targets, factors[WRITERS].tolist(), strict=True)
                return [target.name for target, writes in chosen if writes], factors[STREAM].clone()
        return None

    def _first_look(self, model: nn.Module, rows_of: RowsOf, refresh_step: int) -> tuple[dict[str, Tensor], int]:
        """Returns (factors, calls of the model); of labelled rows it measures what raises labels."""
        if not self._targets:
            raise RequestError(
                "method.basis: none of the tuned parameters is the weight of a linear layer, whose inputs foretell "
                "errors; choose others with method.targets, or set method.basis=gaussian."
            )
        like_last = [target for target in self._targets if output_size(target) == output_size(self._targets[-1])]
        tried = like_last[-math.ceil(LAST_LAYERS * len(like_last)) :]
        count = self._rows_of_a_look(tried, MOST_ROWS)
        rows = rows_of(refresh_step, count)
        places = rows.places()
        with recording(model, tried, places) as seen, recording_ends(model, tried[-1], places) as ends:
            outputs = _finite(rows.outputs())
        if not seen.inputs:
            raise RequestError(
                "method.basis: no linear layer that is tuned has an input for each token of a row; choose others with "
                "method.targets, or set method.basis=gaussian."
            )
        if outputs.tokens_TC is not None:
            return self._of_text(model, rows, tried[-1], ends, outputs), 2 * len(places)
        if not outputs.shared:
            raise RequestError(
                "method.basis: these rows have options of their own, and what foretells errors is regressed on labels "
                "or tokens; set method.name=head-feedback, or method.basis=gaussian."
            )
        last = tried[[t.name for t in tried].index([*seen.inputs][-1])]
        nudges = Nudges(model, rows, places, outputs, refresh_step)
        stream_MC = nudges.stream(last, seen.output_size(last.name))
        names, stream_MC = nudges.writers([t for t in tried if t.name in seen.inputs], stream_MC)
        look = Look(seen, outputs, rows.stepped, 0)
        if len(outputs.labels_T) >= count:  # there are more rows
            look = self._look_at_labels(model, rows_of, refresh_step, names)
        return self._of_labels(look, names, stream_MC), 3 * len(places) + look.passes

    def _look_at_labels(self, model: nn.Module, rows_of: RowsOf, refresh_step: int, names: Sequence[str]) -> "Look":
        """Returns what these layers see of as many rows as their inputs may be kept of."""
        writers = [target for target in self._targets if target.name in names]
        rows = rows_of(refresh_step, self._rows_of_a_look(writers, MOST_LABELLED))
        with recording(model, writers, places := rows.places()) as seen:
            return Look(seen, _finite(rows.outputs()), rows.stepped, len(places))

    def _of_text(self, model: nn.Module, rows: Rows, target: Target, ends: Ends, outputs: Outputs) -> dict[str, Tensor]:
        self.signal = {}
        zeros = {own.name: torch.zeros(input_size(own), self._ranks[own.name]).double() for own in self._targets}
        u_MR, v_IR = read_text(model, target, rows, ends, outputs, self._ranks[target.name])
        whole_1R = torch.ones(1, max(self._ranks.values()), dtype=torch.float64)
        return zeros | {target.name: v_IR, target.name + OUTPUT_SIDE: u_MR, PROPOSED: whole_1R}

    def _of_labels(self, look: "Look", names: Sequence[str], stream_MC: Tensor) -> dict[str, Tensor]:
        """Returns the factors of labelled rows, of layers whose outputs raise classes by S."""
        seen, outputs = look.seen, look.outputs
        targets, error_TC = {target.name: target for target in self._targets}, errors(outputs)
        distinct = {id(own): regress(own.parts(), error_TC[own.places()]) for own in seen.distinct(names)}
        found = {name: distinct[id(seen.inputs[name])] for name in names}
        self.signal = {name: max(part.signal for part in parts) for name, parts in found.items()}
        rank, kinds = min(self._ranks[name] for name in names), len(found[names[-1]])
        places = min(len(part.unseen_PE) for parts in found.values() for part in parts)
        layout = Layout.of(error_TC.shape[1], kinds, rank, places)
        turns_CR, weights_R = common([part for parts in found.values() for part in parts], layout.contrasts)
        totals = [sum(parts[kind].weight for parts in found.values()) or 1.0 for kind in range(kinds)]
        most = max(self._ranks.values())
        factors = {STREAM: stream_MC, PROPOSED: layout.proposed(weights_R, most)}
        foretold_2ER = torch.zeros(2, len(error_TC), most, dtype=torch.float64)
        for name, target in targets.items():
            v_IR = torch.zeros(input_size(target), self._ranks[name], dtype=torch.float64)
            turns_CK = torch.zeros(error_TC.shape[1], self._ranks[name], dtype=torch.float64)
            for kind, part in enumerate(found.get(name, ())):
                columns, weight = layout.columns(kind), part.weight / totals[kind]
                v_IR[:, columns] = weight * part.along(turns_CR)
                turns_CK[:, columns] = turns_CR
                examples_P = outputs.example_T.cpu()[seen.inputs[name].places()]
                foretold_2ER[:, examples_P, columns] += weight * part.foretold(turns_CR)
            if name == names[-1] and layout.biases:
                mean_I = seen.inputs[name].average()
                v_IR[:, layout.bias] = (mean_I / mean_I.square().sum().clamp_min(1e-30)).unsqueeze(1)
                turns_CK[:, layout.bias] = contrasts(error_TC.shape[1])[:, : layout.biases]
            factors[name] = v_IR
            if bool(turns_CK.any()):
                factors[name + OUTPUT_SIDE] = stream_MC @ turns_CK
        every_CR = torch.zeros(error_TC.shape[1], most, dtype=torch.float64)
        for kind in range(kinds):
            every_CR[:, layout.columns(kind)] = turns_CR
        writes = torch.tensor([float(name in names) for name in targets], dtype=torch.float64)
        return factors | {FORETOLD: foretold_2ER[:, : look.stepped], TURNS: every_CR, WRITERS: writes}

    def _rows_of_a_look(self, targets: Sequence[Target], most: int) -> int:
        """Returns the number of rows, at most `most`, whose inputs of these layers may be kept."""
        row, every = sum(4 * input_size(target) for target in targets), sum(t.parameter.nbytes for t in self._targets)
        return max(LEAST_ROWS, min(most, every // SHARE // max(1, row)))


@dataclass(frozen=True)
class Look:
    """Labelled rows that were looked at.

    Attributes:
        seen: inputs of layers there.
        outputs: of the rows.
        stepped: see `Rows.stepped`.
        passes: calls of the model that it took.
    """

    seen: Seen
    outputs: Outputs
    stepped: int | None
    passes: int


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
    """What the columns of labelled rows mean: R contrasts foretold by inputs of each kind, then biases.

    Attributes:
        contrasts: R.
        kinds: of inputs: at the place, and their mean.
        biases: columns with a constant input, in the last layer alone.
    """

    contrasts: int
    kinds: int
    biases: int

    @classmethod
    def of(cls, classes: int, kinds: int, rank: int, places: int) -> "Layout":
        """Returns the layout of the columns of this rank, of regressions on so many places."""
        biases = min(classes - 1, rank // 3)
        return cls(max(1, min(classes - 1, (rank - biases) // kinds, places)), kinds, biases)

    def columns(self, kind: int) -> slice:
        """Returns the columns that inputs of a kind foretell."""
        return slice(kind * self.contrasts, (kind + 1) * self.contrasts)

    @property
    def bias(self) -> slice:
        """The columns with a constant input."""
        return slice(self.kinds * self.contrasts, self.kinds * self.contrasts + self.biases)

    def proposed(self, weights_R: Tensor, rank: int) -> Tensor:
        """Returns the coefficients of the proposed directions, (J, rank); contrasts have these weights in a sum."""
        rows = []
        for bias in range(self.bias.start, self.bias.stop):
            rows.append(functional.one_hot(torch.tensor(bias), rank).double())
        for kind in range(self.kinds):
            rows.append(torch.zeros(rank, dtype=torch.float64))
            rows[-1][self.columns(kind)] = weights_R
        for contrast in range(self.contrasts if self.contrasts > 1 else 0):
            rows.append(torch.zeros(rank, dtype=torch.float64))
            rows[-1][[kind * self.contrasts + contrast for kind in range(self.kinds)]] = 1.0
        return torch.stack(rows)


@dataclass(frozen=True)
class Regression:
    """The regression from inputs to errors.

    Attributes:
        x_PI: inputs, less their mean; float32.
        w_IE: W, float32.
        unseen_PE: what it says of places that it has not seen.
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

    def foretold(self, turns_ER: Tensor) -> Tensor:
        """Returns what these columns say of each place, with it in the regression and without it, (2, P, R)."""
        fitted_PR, size_R = self._fitted(turns_ER)
        return torch.stack([fitted_PR, self.unseen_PE @ turns_ER]) / size_R

    def _fitted(self, turns_ER: Tensor) -> tuple[Tensor, Tensor]:
        fitted_PR = (self.x_PI @ (self.w_IE @ turns_ER.float())).double()
        return fitted_PR, fitted_PR.square().mean(0).sqrt().clamp_min(1e-30)


def _finite(outputs: Outputs) -> Outputs:
    """Returns outputs; raises a `FloatingPointError` where their loss is NaN or infinite."""
    loss = outputs.loss()
    if not math.isfinite(loss):
        raise FloatingPointError(loss)
    return outputs


def regress(inputs: Sequence[Tensor], error_PE: Tensor) -> list[Regression]:
    """Returns the regressions from inputs of each kind, (P, I), to errors, each with the lambda of the best signal."""
    error_PE = error_PE - error_PE.mean(0)
    return [max(_with_ridges(x_PI.float() - x_PI.float().mean(0), error_PE), key=_signal) for x_PI in inputs]


def _signal(found: Regression) -> float:
    return found.signal


def _with_ridges(x_PI: Tensor, error_PE: Tensor) -> list[Regression]:
    gram_PP = (x_PI @ x_PI.T).double()
    mean = float(gram_PP.diagonal().mean())
    found = []
    for ridge in RIDGES:
        added = torch.full((len(gram_PP),), ridge * mean + 1e-12, dtype=gram_PP.dtype)
        inverse_PP = torch.cholesky_inverse(torch.linalg.cholesky(gram_PP + torch.diag(added)))
        alpha_PE = inverse_PP @ error_PE
        unseen_PE = error_PE - alpha_PE / inverse_PP.diagonal().unsqueeze(1)
        size = torch.linalg.vector_norm(unseen_PE) * torch.linalg.vector_norm(error_PE)
        signal = float((unseen_PE * error_PE).sum() / size.clamp_min(1e-30))
        found.append(Regression(x_PI, x_PI.T @ alpha_PE.float(), unseen_PE, signal))
    return found


def common(found: Sequence[Regression], count: int) -> tuple[Tensor, Tensor]:
    """Returns (B (E, R), singular values as parts of the largest): what all say together of unseen places."""
    sizes = [part.unseen_PE.square().mean().sqrt().clamp_min(1e-30) for part in found]
    together_PE = sum(part.weight * part.unseen_PE / size for part, size in zip(found, sizes, strict=True))
    assert isinstance(together_PE, Tensor)
    _, singular_E, turns_EE = torch.linalg.svd(together_PE, full_matrices=False)
    weights_R = singular_E[:count] / singular_E[0].clamp_min(1e-30)
    return turns_EE[:count].T, weights_R
