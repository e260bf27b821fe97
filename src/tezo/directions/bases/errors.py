"""A basis computed from data: inputs that foretell what the outputs are wrong by, and outputs that mend it.

A pass over P places, rows with options or tokens of answers, gives the errors e_p of the outputs there (right minus
said) and the inputs x_p of every linear layer. A change U diag(c) V^T of a weight can mend the errors only as far as
V^T x_p tells them apart. For each layer ridge regression from its inputs to the errors,

    W = X^T (X X^T + lambda I)^-1 E,

gives the few columns V = W B that foretell the errors best, with B the leading right singular vectors of X W; inputs at
the place itself and their mean over the tokens before are regressed apart. The correlation of the errors with what the
regression says of places that it has not seen, in closed form

    e_p - alpha_p / K_pp,   K = (X X^T + lambda I)^-1,   alpha = K E,

says how much signal a layer's inputs carry; where it is far below the best layer's, V is zero and the layer is left as
it is. Columns have V^T x of mean square 1.

On rows with labels, U is measured too. A second pass adds a random vector n_p to the outputs of the last layer in the
row of each example, and the change d_p of the scores (C classes, less their mean) shows the vectors that raise each:

    S = N^T (N N^T + mu I)^-1 D,   (M, C).

Layers with outputs of the same size may write to the same stream. A third pass adds such a vector to the outputs of one
of them in each row; those at which it acts as at the last layer are changed, with U = S B: a unit of c adds what V
foretells to the scores. The last layer also has constant inputs, V^T x about 1, by which labels get a bias.

Elsewhere U is Gaussian, and V has the size of the layer's outputs. Everywhere only the last layers of the model are
tried, where a change acts on the outputs of the model more nearly in proportion, and V is divided by the root of the
number of all columns: a perturbation of scale rho moves scores, or the outputs of layers, by about the part rho.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.bases.basis import CollectedFactors, RowsOf
from tezo.directions.bases.collected import OUTPUT_SIDE, CollectedBasis, input_size
from tezo.directions.outputs import Outputs, Places, Rows, change, errors
from tezo.directions.random import normal
from tezo.directions.targets import Target, only_input
from tezo.system.errors import RequestError

MOST_ROWS = 256
"""Rows that are looked at, at most."""
LEAST_ROWS = 32
SHARE = 8
"""Inputs are kept in half precision, at most this part of the bytes of all layers, from `LEAST_ROWS` rows on."""
MOST_PLACES = 1024
"""Places of which inputs are kept, evenly spaced among all."""
RIDGE = 0.3
"""lambda, as a part of the mean of the diagonal of X X^T; likewise mu."""
KEPT_SIGNAL = 0.7
"""Least correlation of a layer that is changed, as a part of the best layer's."""
LAST_LAYERS = 1 / 4
"""Layers that may be changed, the last ones of the model, as a part of all."""
NUDGE = 0.1
"""Size of the vectors that are added to outputs of layers, as a part of theirs."""
PUSH = 0.3
"""By how much a class's score should be raised where layers are tried."""
KEPT_EFFECT = 0.3
"""Least effect of a vector at a layer, as a part of its effect at the last one."""
PROJECTIONS = 32
"""Random projections of errors over a vocabulary."""
WEAK = 1e-3
"""Columns whose singular value is a smaller part of the largest are zero: errors over C options have rank C - 1."""
STREAM = "outputs of the last layer"
"""The name under which S is kept with the factors."""


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

    def collect(self, refresh_step: int) -> CollectedFactors:
        if self._source is None:
            raise RequestError(
                "method.basis: this basis is computed from the outputs of rows, and was given none; call "
                "optimizer.set_rows(rows), or set method.basis=gaussian."
            )
        model, rows_of = self._source
        tried = self._targets[-math.ceil(LAST_LAYERS * len(self._targets)) :]
        rows = rows_of(refresh_step, rows_of_a_look(tried, sum(t.parameter.nbytes for t in self._targets)))
        places = rows.places()
        with recording(model, tried, places) as seen:
            outputs = rows.outputs()
        if not seen.inputs:
            raise RequestError(
                "method.basis: no linear layer that is tuned has an input for each token of a row; choose others with "
                "method.targets, or set method.basis=gaussian."
            )
        error_TE = errors(outputs, PROJECTIONS)
        names = list(seen.inputs)
        targets = {target.name: target for target in self._targets}
        factors: dict[str, Tensor] = {}
        looks = 1
        if outputs.shared:
            nudges = Nudges(model, rows, places, outputs, refresh_step)
            last = targets[names[-1]]
            names = [name for name in names if output_size(targets[name]) == output_size(last)]
            before = self._collected[max(self._collected)].factors if self._collected else {}
            stream_MC = before.get(STREAM)
            if stream_MC is None:
                stream_MC = nudges.stream(last, NUDGE * seen.output_size(last.name))
                looks += 1
            names, stream_MC = nudges.writers([targets[name] for name in names], stream_MC)
            factors[STREAM] = stream_MC
            looks += 1
        found = {id(own): regress(own, error_TE[own.places()]) for own in seen.distinct(names)}
        self.signal = {name: max(part.signal for part in found[id(seen.inputs[name])]) for name in names}
        least = KEPT_SIGNAL * max(self.signal.values(), default=0.0)
        for name, target in targets.items():
            rank = self._ranks[name]
            v_IR = torch.zeros(input_size(target), rank, dtype=torch.float64)
            if self.signal.get(name, -1.0) >= least:
                own, turns = columns(found[id(seen.inputs[name])], rank, len(error_TE.T))
                if outputs.shared and name == names[-1]:
                    own, turns = with_constant(own, turns, seen.inputs[name].means[0].double(), rank)
                v_IR[:, : own.shape[1]] = own / math.sqrt(len(names) * own.shape[1])
                if outputs.shared:
                    factors[name + OUTPUT_SIDE] = functional.pad(factors[STREAM] @ turns, (0, rank - turns.shape[1]))
                else:
                    v_IR *= seen.output_size(name)
            factors[name] = v_IR
        return CollectedFactors(factors, looks * len(places))


def rows_of_a_look(targets: Sequence[Target], most_bytes: int) -> int:
    """Returns the number of rows whose inputs of these layers may be kept, in a part of so many bytes."""
    row = sum(4 * input_size(target) for target in targets)
    return max(LEAST_ROWS, min(MOST_ROWS, most_bytes // SHARE // max(1, row)))


def output_size(target: Target) -> int:
    """Returns the number of outputs of a linear layer."""
    return target.matrix_shape[1 if target.input_role == "u" else 0]


@dataclass
class Inputs:
    """Inputs of the layers that share them, at the places of all passes.

    Attributes:
        at: inputs at the place, (P, I) for each pass, in half precision, less their mean in the first one.
        mean: likewise the means over the tokens before.
        place: the places.
        means: these means in the first pass, (I,), as far as there are any.
    """

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
        self.place.append(place.cpu())

    def parts(self) -> list[Tensor]:
        """Returns the inputs at the place and the means, (P, I) each, as far as there are any."""
        return [torch.cat(own) for own in (self.at, self.mean) if own]


@dataclass(frozen=True)
class Regression:
    """The regression from inputs to errors.

    Attributes:
        columns_IE: columns, those that foretell most first, with V^T x of mean square 1.
        turns_EE: for each column (second index) the errors that it foretells: right singular vectors.
        weights_E: singular values, as parts of the largest.
        signal: correlation of the errors with what the regression says of unseen places.
    """

    columns_IE: Tensor
    turns_EE: Tensor
    weights_E: Tensor
    signal: float


def regress(inputs: Inputs, error_PE: Tensor) -> list[Regression]:
    """Returns the regressions from inputs at the place and from means to errors, as far as there are such inputs."""
    error_PE = error_PE - error_PE.mean(0)
    found = []
    for x_PI in inputs.parts():
        x_PI = x_PI.float()
        x_PI = x_PI - x_PI.mean(0)
        inverse_PP = _inverse(x_PI)
        alpha_PE = inverse_PP @ error_PE
        unseen_PE = error_PE - alpha_PE / inverse_PP.diagonal().unsqueeze(1)
        size = torch.linalg.vector_norm(unseen_PE) * torch.linalg.vector_norm(error_PE)
        signal = float((unseen_PE * error_PE).sum() / size.clamp_min(1e-30))
        w_IE = x_PI.T @ alpha_PE.float()
        _, singular_E, turns_EE = torch.linalg.svd((x_PI @ w_IE).double(), full_matrices=False)
        columns_IE = w_IE.double() @ turns_EE.T
        sizes_E = (x_PI @ columns_IE.float()).double().square().mean(0).sqrt().clamp_min(1e-30)
        weights_E = singular_E / singular_E[0].clamp_min(1e-30)
        found.append(Regression(columns_IE / sizes_E, turns_EE.T, weights_E, signal))
    return found


def _inverse(x_PI: Tensor) -> Tensor:
    """Returns (X X^T + lambda I)^-1 in float64 on the CPU."""
    gram_PP = (x_PI @ x_PI.T).double()
    gram_PP.diagonal().add_(RIDGE * float(gram_PP.diagonal().mean()) + 1e-12)
    return torch.cholesky_inverse(torch.linalg.cholesky(gram_PP))


def columns(found: Sequence[Regression], rank: int, most: int) -> tuple[Tensor, Tensor]:
    """Returns (V (I, R), weighted turns (E, R)) of the leading columns of all regressions, at most `rank`."""
    v, turns = [], []
    for part in found:
        kept = min(rank // len(found), most, int((part.weights_E > WEAK).sum()))
        v.append(part.columns_IE[:, :kept])
        turns.append(part.turns_EE[:, :kept] * part.weights_E[:kept])
    return torch.cat(v, 1), torch.cat(turns, 1)


def with_constant(v_IR: Tensor, turns_CR: Tensor, mean_I: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns V and turns with a constant input for each of C - 1 contrasts of classes, as the first columns."""
    classes = len(turns_CR)
    contrasts_CC, _ = torch.linalg.qr(torch.eye(classes, dtype=torch.float64) - 1 / classes)
    added = min(classes - 1, rank)
    constant_I1 = (mean_I / mean_I.square().sum().clamp_min(1e-30)).unsqueeze(1)
    v = torch.cat([constant_I1.cpu().expand(-1, added), v_IR], 1)[:, :rank]
    return v, torch.cat([contrasts_CC[:, :added], turns_CR], 1)[:, :rank]


class Nudges:
    """Measures how vectors that are added to outputs of layers act on the scores of labels.

    Args:
        model: the model.
        rows: rows with labels.
        places: of these rows.
        own: their outputs.
        step: of the draws.
    """

    def __init__(self, model: nn.Module, rows: Rows, places: Sequence[Places | None], own: Outputs, step: int) -> None:
        self._model, self._rows, self._places, self._own, self._step = model, rows, places, own, step

    def stream(self, target: Target, size: float) -> Tensor:
        """Returns S (M, C): how much of each class's score an added vector raises, per unit of it; float64.

        Args:
            target: the layer.
            size: of each number of the vectors.
        """
        shape = len(self._own.labels_T), output_size(target)
        nudge_TM = normal(shape, seed=0, step=self._step, name=target.name, role="nudge").double() * size
        raised_TC = self._raised({target.name: target}, {target.name: nudge_TM})
        gradient_MC = nudge_TM.T @ (_inverse(nudge_TM.float()) @ raised_TC)
        # the vector that raises a class by 1, by what was measured along it
        return gradient_MC / gradient_MC.square().sum(0, keepdim=True).clamp_min(1e-30)

    def writers(self, targets: Sequence[Target], stream_MC: Tensor) -> tuple[list[str], Tensor]:
        """Returns (the layers at whose outputs S acts as at the last one, S scaled so that it raises scores by 1)."""
        count, classes = len(self._own.labels_T), stream_MC.shape[1]
        turn_T = torch.arange(count)
        class_T = (turn_T // len(targets)) % classes
        vectors_TM = PUSH * stream_MC.T[class_T]
        nudges = {t.name: vectors_TM * (turn_T % len(targets) == i).unsqueeze(1) for i, t in enumerate(targets)}
        raised_TC = self._raised({t.name: t for t in targets}, nudges)
        wanted_TC = PUSH * (functional.one_hot(class_T, classes).double() - 1 / classes)
        effect_T = (raised_TC * wanted_TC).sum(1) / wanted_TC.square().sum(1)
        effects = [float(effect_T[turn_T % len(targets) == i].mean()) for i in range(len(targets))]
        kept = [t.name for t, effect in zip(targets, effects, strict=True) if effect >= KEPT_EFFECT * effects[-1]]
        return kept or [targets[-1].name], stream_MC / max(effects[-1], 0.1)

    def _raised(self, targets: Mapping[str, Target], nudges: Mapping[str, Tensor]) -> Tensor:
        """Returns the changes of the scores (T, C), less their mean over the classes, with vectors added."""
        passes = iter(self._places)
        now: list[Places | None] = [None]

        def enter(*_: object) -> None:
            now[0] = next(passes, None)

        def add(name: str, module: nn.Module, args: object, output: Tensor) -> Tensor:
            del module, args
            if now[0] is None or len(now[0].example_R) != len(output):
                return output
            return output + nudges[name][now[0].example_R.cpu()].to(output.device, output.dtype).unsqueeze(1)

        with ExitStack() as hooks:
            hooks.enter_context(self._model.register_forward_pre_hook(enter))
            for name, target in targets.items():
                hooks.enter_context(target.sites[0].module.register_forward_hook(partial(add, name)))
            moved = self._rows.outputs(self._own)
        raised_TC = change(moved, self._own)
        return raised_TC - raised_TC.mean(1, keepdim=True)


class Seen:
    """What `recording` has seen.

    Attributes:
        inputs: parameter name -> inputs of its layer, in the order in which layers are called.
    """

    def __init__(self, model_places: Sequence[Places | None]) -> None:
        total = sum(len(own.place_P) for own in model_places if own is not None)
        self._stride = max(1, -(-total // MOST_PLACES))
        self._passes = iter(model_places)
        self._now: Places | None = None
        self._last: dict[tuple[int, ...], tuple[Inputs, Tensor]] = {}
        self.inputs: dict[str, Inputs] = {}
        self._adds: set[str] = set()
        self._squares: dict[str, list[float]] = {}

    def enter(self, *_: object) -> None:
        """Called before each pass of the model."""
        own = next(self._passes, None)
        self._last.clear()
        if own is not None:
            kept = own.place_P % self._stride == 0
            own = Places(own.row_P[kept], own.position_P[kept], own.stop_P[kept], own.place_P[kept], own.example_R)
        self._now = own if own is not None and len(own.place_P) else None

    def take(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Called after each call of a layer."""
        del module
        now, x_RLI = self._now, only_input(args, kwargs)
        if now is None or x_RLI.ndim != 3 or len(x_RLI) != len(now.example_R):
            return
        at, mean = _at(x_RLI, now), _mean(x_RLI, now)
        shown = at if at is not None else mean
        assert shown is not None
        if name not in self.inputs:
            before = self._last.get(tuple(shown.shape))
            is_shared = before is not None and torch.equal(before[1], shown)
            self.inputs[name] = before[0] if is_shared and before is not None else Inputs()
            if not is_shared:
                self._adds.add(name)
        if name in self._adds:
            self.inputs[name].add(at, mean, now.place_P)
            self._last[tuple(shown.shape)] = self.inputs[name], shown
        out = _at(output, now) if at is not None else _mean(output, now)
        assert out is not None
        self._squares.setdefault(name, []).append(float(out.float().square().mean()))

    def distinct(self, names: Sequence[str]) -> Iterator[Inputs]:
        """Yields each of the inputs of these layers once."""
        yield from {id(self.inputs[name]): self.inputs[name] for name in names}.values()

    def output_size(self, name: str) -> float:
        """Returns the root mean square of a layer's outputs."""
        return math.sqrt(sum(self._squares[name]) / len(self._squares[name]))


def _at(x_RLI: Tensor, places: Places) -> Tensor | None:
    """Returns the vectors at the places, (P, I); None if the places have no position."""
    if bool((places.position_P < 0).any()):
        return None
    device = x_RLI.device
    return x_RLI[places.row_P.to(device), places.position_P.to(device)].detach().float()


def _mean(x_RLI: Tensor, places: Places) -> Tensor | None:
    """Returns the means over the tokens that answers depend on, (P, I); None if they are not averaged."""
    if not bool((places.stop_P > 0).all()):
        return None
    row_P, stop_P = places.row_P.to(x_RLI.device), places.stop_P.to(x_RLI.device)
    weight_PL = (torch.arange(x_RLI.shape[1], device=x_RLI.device) < stop_P.unsqueeze(1)) / stop_P.unsqueeze(1)
    return torch.bmm(weight_PL.to(x_RLI.dtype).unsqueeze(1), x_RLI.detach()[row_P]).squeeze(1).float()


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
