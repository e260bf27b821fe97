"""A basis computed from data: the inputs of each layer that foretell what the outputs are wrong by.

A pass over P places, rows with options or tokens of answers, gives the errors e_p of the outputs there (right minus
said) and the inputs x_p of every linear layer. A change A V^T of a weight can mend the errors only as far as V^T x_p
tells them apart. For each layer ridge regression from its inputs to the errors,

    W = X^T (X X^T + lambda I)^-1 E,

gives the few columns V = W B that foretell the errors best, with B the leading right singular vectors of X W. Inputs at
the place itself and their mean over the tokens before are regressed apart. The correlation of the errors with what the
regression says of places that it has not seen, in closed form

    e_p - alpha_p / K_pp,   K = (X X^T + lambda I)^-1,   alpha = K E,

says how much signal a layer's inputs carry; where it is far below the best layer's, V is zero and the layer is left as
it is. Columns have V^T x of mean square 1, times that of the layer's outputs, over the number of layers: a
perturbation of scale rho moves the layers together by the part rho of their outputs.

Only the last layers of a pass are changed. Where a bias for each label would lower the loss much, they are only the
last few, and V is the mean input, so that V^T x is about 1: outputs move together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.bases.basis import CollectedFactors, RowsOf
from tezo.directions.bases.collected import CollectedBasis, input_size
from tezo.directions.outputs import Outputs, Places, Rows, errors, needs_bias
from tezo.directions.targets import Target, only_input
from tezo.system.errors import RequestError

MOST_ROWS = 384
"""Rows that are looked at, at most."""
LEAST_ROWS = 32
SHARE = 2
"""Inputs are kept in half precision, at most a half of the bytes of the layers, from `LEAST_ROWS` rows on."""
MOST_PLACES = 1024
"""Places of which inputs are kept, evenly spaced among all."""
RIDGE = 0.3
"""lambda, as a part of the mean of the diagonal of X X^T."""
KEPT_SIGNAL = 0.7
"""Least correlation of a layer that is changed, as a part of the best layer's."""
LAST_LAYERS = 1 / 8
"""Layers that are changed, the last ones that a pass calls, as a part of all: their outputs act on those of the model
more nearly in proportion than outputs of earlier layers."""
BIAS_ROWS, BIAS_LAYERS = 64, 7
"""Rows that are looked at for a bias, and the last layers that learn it."""
PROJECTIONS = 32
"""Random projections of errors over a vocabulary."""
WEAK = 1e-3
"""Columns whose singular value is a smaller part of the largest are zero: errors over C options have rank C - 1."""


class ErrorBasis(CollectedBasis):
    """Inputs of linear layers that foretell the errors of the outputs; see the module.

    Attributes:
        signal: parameter name -> correlation with the errors of unseen places, of the last refresh.
    """

    def __init__(self) -> None:
        super().__init__()
        self._source: tuple[nn.Module, RowsOf] | None = None
        self.signal: dict[str, float] = {}

    def set_rows(self, model: nn.Module, rows: RowsOf) -> None:
        self._source = model, rows

    def collect(self, refresh_step: int) -> CollectedFactors:
        if self._source is None:
            raise RequestError(
                "method.basis: this basis is computed from the outputs of rows, and was given none; call "
                "optimizer.set_rows(rows), or set method.basis=gaussian."
            )
        model, rows_of = self._source
        calls, count = 0, rows_to_look_at(self._targets)
        few = rows_of(refresh_step, min(count, BIAS_ROWS))
        if few.labelled:
            seen, outputs = look(model, self._targets, few)
            calls += seen.calls
            if needs_bias(outputs):
                return CollectedFactors(self._factors(seen, self._constant(seen)), calls)
        seen, outputs = look(model, self._targets, rows_of(refresh_step, count) if count > few.examples else few)
        return CollectedFactors(self._factors(seen, self._foretelling(seen, outputs)), calls + seen.calls)

    def _constant(self, seen: "Seen") -> dict[str, Tensor]:
        """Returns for the last layers the column v with v . x = 1 at the mean input."""
        columns = {}
        for name in list(seen.inputs)[-BIAS_LAYERS:]:
            mean_I = seen.inputs[name].means[0].double()
            columns[name] = (mean_I / mean_I.square().sum().clamp_min(1e-30)).unsqueeze(1)
        return columns

    def _foretelling(self, seen: "Seen", outputs: Outputs) -> dict[str, Tensor]:
        """Returns the columns that foretell the errors, of the layers that carry signal."""
        error_TE = errors(outputs, PROJECTIONS)
        found = {id(own): self._regression(own, error_TE[own.places()]) for own in seen.distinct()}
        self.signal = {name: found[id(own)].signal for name, own in seen.inputs.items()}
        least = KEPT_SIGNAL * max(self.signal.values(), default=0.0)
        last = list(seen.inputs)[-math.ceil(LAST_LAYERS * len(seen.inputs)) :]
        return {name: found[id(seen.inputs[name])].columns_IR for name in last if self.signal[name] >= least}

    def _regression(self, own: "Inputs", error_PE: Tensor) -> "Regression":
        return regress(own, error_PE, min(self._ranks[name] for name in own.names))

    def _factors(self, seen: "Seen", columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the factors, scaled so that all layers together move outputs by their own size."""
        factors = {}
        for target in self._targets:
            v_IR = torch.zeros(input_size(target), self._ranks[target.name], dtype=torch.float64)
            own = columns.get(target.name)
            if own is not None:
                v_IR[:, : own.shape[1]] = own * (seen.output_size(target.name) / math.sqrt(len(columns) * own.shape[1]))
            factors[target.name] = v_IR
        return factors


def look(model: nn.Module, targets: Sequence[Target], rows: Rows) -> tuple["Seen", Outputs]:
    """Returns (the inputs of the layers at the places of the rows, the outputs there)."""
    with recording(model, targets, rows.places()) as seen:
        outputs = rows.outputs()
    return seen, outputs


def rows_to_look_at(targets: Sequence[Target]) -> int:
    """Returns the number of rows whose inputs may be kept."""
    row = sum(4 * input_size(target) for target in targets)
    weights = sum(target.parameter.nbytes for target in targets)
    return max(LEAST_ROWS, min(MOST_ROWS, weights // SHARE // max(1, row)))


@dataclass
class Inputs:
    """Inputs of the layers that share them, at the places of all passes.

    Attributes:
        names: parameters of these layers.
        at: inputs at the place, (P, I) for each pass, in half precision, less their mean in the first one.
        mean: likewise the means over the tokens before.
        place: the places.
        means: these means in the first pass, (I,), as far as there are any.
    """

    names: list[str]
    at: list[Tensor] = field(default_factory=list)
    mean: list[Tensor] = field(default_factory=list)
    place: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)

    def places(self) -> Tensor:
        """Returns the places, (P,)."""
        return torch.cat(self.place)

    def add(self, at: Tensor | None, mean: Tensor | None, place: Tensor) -> None:
        """Adds the inputs of a pass."""
        shown = [(values, kept) for values, kept in ((at, self.at), (mean, self.mean)) if values is not None]
        if not self.means:
            self.means = [values.mean(0) for values, _ in shown]
        for (values, kept), mean_I in zip(shown, self.means, strict=True):
            kept.append((values - mean_I).clamp(-6e4, 6e4).half().cpu())
        self.place.append(place)

    def parts(self) -> list[Tensor]:
        """Returns the inputs at the place and the means, (P, I) each, as far as there are any."""
        return [torch.cat(own) for own in (self.at, self.mean) if own]


@dataclass(frozen=True)
class Regression:
    """Columns (I, r) that foretell the errors, and their correlation with the errors of places not seen."""

    columns_IR: Tensor
    signal: float


def regress(inputs: Inputs, error_PE: Tensor, columns: int) -> Regression:
    """Returns the regression from inputs to errors; the columns are divided among inputs at the place and means."""
    parts = inputs.parts()
    found = [_ridge(x_PI, error_PE, columns // len(parts)) for x_PI in parts]
    return Regression(torch.cat([own.columns_IR for own in found], 1), max(own.signal for own in found))


def _ridge(x_PI: Tensor, error_PE: Tensor, columns: int) -> Regression:
    x_PI = x_PI.float()
    x_PI = x_PI - x_PI.mean(0)
    error_PE = error_PE - error_PE.mean(0)
    gram_PP = (x_PI @ x_PI.T).double()
    ridge = RIDGE * float(gram_PP.diagonal().mean()) + 1e-12
    gram_PP.diagonal().add_(ridge)
    inverse_PP = torch.cholesky_inverse(torch.linalg.cholesky(gram_PP))
    alpha_PE = inverse_PP @ error_PE
    unseen_PE = error_PE - alpha_PE / inverse_PP.diagonal().unsqueeze(1)
    size = torch.linalg.vector_norm(unseen_PE) * torch.linalg.vector_norm(error_PE)
    signal = float((unseen_PE * error_PE).sum() / size.clamp_min(1e-30))
    w_IE = x_PI.T.double() @ alpha_PE
    said_PE = x_PI.double() @ w_IE
    _, singular_E, turns_EE = torch.linalg.svd(said_PE, full_matrices=False)
    kept = min(columns, int((singular_E > WEAK * singular_E[0].clamp_min(1e-30)).sum()))
    v_IR = w_IE @ turns_EE[:kept].T
    sizes_R = (x_PI.double() @ v_IR).square().mean(0).sqrt().clamp_min(1e-30)
    return Regression(v_IR / sizes_R, signal)


class Seen:
    """What `recording` has seen.

    Attributes:
        inputs: parameter name -> inputs of its layer, in the order in which layers are called.
        calls: calls of the model.
    """

    def __init__(self, model_places: Sequence[Places | None]) -> None:
        self.calls = len(model_places)
        total = sum(len(own.place_P) for own in model_places if own is not None)
        self._stride = max(1, -(-total // MOST_PLACES))
        self._passes = iter(model_places)
        self._now: Places | None = None
        self._last: dict[tuple[int, ...], tuple[Inputs, Tensor]] = {}
        self.inputs: dict[str, Inputs] = {}
        self._squares: dict[str, list[float]] = {}

    def enter(self, *_: object) -> None:
        """Called before each pass of the model."""
        own = next(self._passes, None)
        self._last.clear()
        if own is not None:
            kept = own.place_P % self._stride == 0
            own = Places(own.row_P[kept], own.position_P[kept], own.stop_P[kept], own.place_P[kept])
        self._now = own if own is not None and len(own.place_P) else None

    def take(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called after each call of a layer."""
        del module
        now, x_RLI = self._now, only_input(args, kwargs)
        if now is None or x_RLI.ndim != 3 or int(now.row_P.max()) >= len(x_RLI):
            return
        at, mean = _at(x_RLI, now), _mean(x_RLI, now)
        shown = at if at is not None else mean
        assert shown is not None
        own = self.inputs.get(name)
        before = self._last.get(tuple(shown.shape))
        if own is None:
            same = before is not None and torch.equal(before[1], shown)
            own = self.inputs[name] = before[0] if same and before is not None else Inputs([])
            own.names.append(name)
        if own.names[0] == name:
            own.add(at, mean, now.place_P)
            self._last[tuple(shown.shape)] = own, shown
        out = _at(output, now) if at is not None else _mean(output, now)
        assert out is not None
        self._squares.setdefault(name, []).append(float(out.float().square().mean()))

    def distinct(self) -> Iterator[Inputs]:
        """Yields each of the inputs once."""
        yield from {id(own): own for own in self.inputs.values()}.values()

    def output_size(self, name: str) -> float:
        """Returns the root mean square of a layer's outputs."""
        return float(torch.tensor(self._squares[name]).mean().sqrt())


def _at(x_RLI: Tensor, places: Places) -> Tensor | None:
    if bool((places.position_P < 0).any()):
        return None
    device = x_RLI.device
    return x_RLI[places.row_P.to(device), places.position_P.to(device)].detach().float()


def _mean(x_RLI: Tensor, places: Places) -> Tensor | None:
    if not bool((places.stop_P > 0).all()):
        return None
    rows_P, stop_P = places.row_P.to(x_RLI.device), places.stop_P.to(x_RLI.device)
    inside_PL = torch.arange(x_RLI.shape[1], device=x_RLI.device) < stop_P.unsqueeze(1)
    weight_PL = inside_PL.to(x_RLI.dtype) / stop_P.unsqueeze(1)
    return torch.einsum("pl,pli->pi", weight_PL, x_RLI.detach()[rows_P]).float()


@contextmanager
def recording(model: nn.Module, targets: Sequence[Target], places: Sequence[Places | None]) -> Iterator[Seen]:
    """Keeps the inputs of the targets' layers at these places, pass after pass, while open."""
    seen = Seen(places)
    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(seen.enter))
        for target in targets:
            hook = partial(seen.take, target.name)
            hooks.enter_context(target.sites[0].module.register_forward_hook(hook, with_kwargs=True))
        yield seen
