"""Free text: the loss as a function of the inputs of the head, and a regression of the last layer on it.

A pass over P tokens of answers gives the inputs x_p of layers, the inputs h_p of the output head, and how likely C
tokens are there: the right ones, and those that are likely somewhere. With inputs h of the head, the scores of these
tokens are

    z_pc = k H_c . h_p,

H_c the rows of the head, k the factor by which the model scales its scores; the sum of exp z over all other tokens
grows as that over some of them drawn at random. So the loss of any h_p follows without the model (`Text.loss`).

Where the last blocks of a model can be rebuilt, `sweep` learns from it. Else U V^T is beside the last layer alone, with
U (M x r) and V (I x r) by a multinomial regression. A second pass adds noise n_p to the outputs of that layer, and the
change d_p of h shows how much of each output arrives at each place:

    g_m = sum_p d_pm n_pm / sum_p n_pm^2,   s_p = sum_m d_pm g_m n_pm / sum_m (g_m n_pm)^2,
    h_p(U, V) = N(h_p + g * (U V^T s_p x_p)),

s shrunk towards 1 as far as it differs by chance; N keeps the length of h / g. Adam fits U and V, from U = 0 and the
leading directions of x, along which its mean square is 1 / r. It ends where the loss of held-out rows, the dev rows of
a run, is lowest. Without such rows a quarter of the examples is held out, and the fit is done once more with all of
them, in as many steps.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.bases.basis import output_size
from tezo.directions.outputs import RARE, Outputs, Places
from tezo.directions.random import normal
from tezo.directions.targets import Target, output_head
from tezo.forward.engine import HEAD, LayerInputs
from tezo.forward.watching import Watcher, at_places
from tezo.newton.last_blocks import name_of
from tezo.newton.recording import NUDGE, finite
from tezo.optim.closures import RowOutputs
from tezo.system.errors import RequestError
from tezo.system.signals import let_interrupt

MOST_TOKENS = 4096
"""Tokens of answers that are kept, evenly spaced among all: with I + D numbers each, in float32."""
MOST_CLASSES, OTHERS = 4096, 2048
"""Tokens whose scores are followed one by one, at most, unless more are right somewhere; and how many of all others."""
HELD_OUT = 4
"""One of so many examples is held out, to end by."""
EPOCHS, PATIENCE, AT_ONCE, SEEN_AT_ONCE = 40, 3, 128, 512
"""Most passes over the tokens, those without a gain, tokens of a step, and tokens whose loss is computed at a time."""
RATE = 4e-3
"""Rate of Adam, in units of V^T x and of scores. In a trial on completions with a decoder of 135M parameters, 0.002
came to nearly the same on other rows, and 0.01 to a little less."""
LEAST_ARRIVES = 0.25
"""Least part of the change of h that g explains."""
LEAST_GAIN = 0.05
"""Outputs of which a smaller part arrives than this part of the mean are not changed."""


class TextRecord(Watcher):
    """Keeps the inputs of layers and of the head at places; adds noise to the outputs of one.

    Args:
        layers: modules whose inputs are kept.
        noisy: layer to whose outputs noise is added; None: to none.
        size: root mean square of the noise.
        trail: tokens that are watched for each place.

    Attributes:
        place: numbers of the places, (P,) for each pass.
        x: module -> inputs of the layer, (P, I) for each pass, in float32 on the CPU.
        h: inputs of the head, (P, D), likewise.
        noise: noise added to the outputs of the layer, (P, M); nothing, if none was added.
        squares: mean squares of the outputs of the last of the layers.
        like: a tensor of no rows, and of the type and on the device of the head's inputs.
    """

    most, flattened = MOST_TOKENS, True

    def __init__(
        self, layers: Sequence[str], noisy: Target | None = None, size: float = 0.0, *, trail: int = 1
    ) -> None:
        self.trail = trail
        self._last, self._noisy, self._size, self._passes = layers[-1], noisy, size, 0
        self.inputs, self.adds = [*layers, HEAD], [] if noisy is None else [name_of(noisy)]
        self.place: list[Tensor] = []
        self.x: dict[str, list[Tensor]] = {layer: [] for layer in layers}
        self.h: list[Tensor] = []
        self.noise: list[Tensor] = []
        self.squares: list[float] = []
        self.like = torch.zeros(0)

    def begin(self) -> None:
        self._passes += 1

    def added(self, layer: str, places: Places, tokens: int) -> Tensor:
        del layer
        assert self._noisy is not None
        shape = len(places.example_R), tokens, output_size(self._noisy)
        noise_RLM = self._size * normal(shape, seed=0, step=self._passes, name=self._noisy.name, role="nudge").float()
        self.noise.append(at_places(noise_RLM, places))
        return noise_RLM

    def take(self, layer: str, places: Places, inputs: LayerInputs) -> None:
        assert inputs.at_PI is not None
        own = inputs.at_PI.float().cpu()
        if layer == HEAD:
            self.place.append(places.place_P)
            self.h.append(own)
            self.like = inputs.at_PI.new_empty(0, inputs.at_PI.shape[1])
            return
        self.x[layer].append(own)
        if layer == self._last:
            self.squares.append(inputs.output_square)

    def last_of_places(self) -> Tensor:
        """Returns where the places themselves are among the tokens that are watched for them, int64."""
        place_P = torch.cat(self.place)
        return torch.cat([place_P[1:] != place_P[:-1], torch.ones(1, dtype=torch.bool)]).nonzero()[:, 0]

    @property
    def is_whole(self) -> bool:
        """Whether each layer was seen wherever the head was."""
        return all(sum(map(len, x)) == sum(map(len, self.h)) for x in self.x.values())


def fits_text(model: Any) -> bool:
    """Returns whether the last layers of a transformers model can write to the inputs of its output head."""
    return bool(getattr(output_head(model), "in_features", 0) == model.config.get_text_config().hidden_size)


Pair = tuple[Tensor, Tensor]
"""U (M, r) and V (I, r) of a layer."""


class LastLayer:
    """One layer whose outputs arrive at the head; see the module.

    Args:
        x_PI: its inputs, float32, times s.
        h_PD: inputs of the head.
        gain_D: g.
        unit: of the entries of g U.
        rank: r.

    Attributes:
        start: (U, V) at the start of the fit, in the units of Adam.
    """

    def __init__(self, x_PI: Tensor, h_PD: Tensor, gain_D: Tensor, unit: float, rank: int) -> None:
        self._h_PD, self._per_D, self._unit = h_PD, reciprocal(gain_D), unit
        self._length_P = torch.linalg.vector_norm(h_PD * self._per_D, dim=1)
        self._size = size_of(x_PI)
        self._x_PI = x_PI / self._size
        self.start: Pair = torch.zeros(h_PD.shape[1], rank), leading(self._x_PI, rank)

    def of(self, factors: Pair, places_P: Tensor) -> Tensor:
        """Returns the inputs of the head at places, (P, D), with these factors in the units of Adam."""
        u_DR, v_IR = factors
        h_PD = self._h_PD[places_P] + self._unit * (self._x_PI[places_P] @ v_IR) @ u_DR.T
        longer_P: Tensor = torch.linalg.vector_norm(h_PD * self._per_D, dim=1) / self._length_P[places_P]
        return h_PD / longer_P.unsqueeze(1)

    def scaled(self, factors: Pair) -> Pair:
        """Returns factors in the units of the model, float64, of those in the units of Adam."""
        u_DR, v_IR = factors
        return self._per_D.double().unsqueeze(1) * self._unit * u_DR.double(), v_IR.double() / self._size


@dataclass(frozen=True)
class Seen:
    """A pass over rows of free text.

    Attributes:
        rows: the rows.
        record: what was kept.
        outputs: of the rows.
    """

    rows: RowOutputs
    record: TextRecord
    outputs: Outputs

    @classmethod
    def of(cls, model: nn.Module, rows: RowOutputs, layers: Sequence[str]) -> "Seen":
        """Passes the rows through the model, and keeps the inputs of these layers."""
        record = TextRecord(layers)
        with rows.watching(model, record):
            return cls(rows, record, finite(rows.outputs()))

    @property
    def tokens(self) -> Tensor:
        """The right token and likely ones at each place, (P, K)."""
        assert self.outputs.tokens_TC is not None
        return self.outputs.tokens_TC.cpu()[torch.cat(self.record.place), :-1]

    @property
    def log_probs(self) -> Tensor:
        """Their log-probabilities, (P, K)."""
        return self.outputs.scores_TC.cpu()[torch.cat(self.record.place), :-1].float()

    @property
    def examples(self) -> Tensor:
        """The number of the example at each place, (P,)."""
        return self.outputs.example_T.cpu()[torch.cat(self.record.place)]

    @property
    def held(self) -> Tensor:
        """Which places are of the examples that are held out where there are no other rows, (P,)."""
        _, number_P = torch.unique(self.examples, return_inverse=True)
        held_P: Tensor = number_P % HELD_OUT == 0
        return held_P

    @property
    def head_inputs(self) -> Tensor:
        """The inputs of the head, (P, D)."""
        return torch.cat(self.record.h)

    def inputs(self, layer: str) -> Tensor:
        """Returns the inputs of a layer, (P, I)."""
        return torch.cat(self.record.x[layer])


def fit_text(model: nn.Module, target: Target, seen: Sequence[Seen], rank: int) -> tuple[Pair, int]:
    """Returns (U (M, r), V (I, r)) of the last layer, float64, and the further calls of the model.

    Args:
        model: the model.
        target: the last layer.
        seen: the rows that are fitted, and rows that are held out, if there are any.
        rank: r.

    Raises:
        RequestError: the last layer does not write to the input of the head.
    """
    text, h_PD = readout(model, target, seen), torch.cat([each.head_inputs for each in seen])
    own, *others = (len(each.tokens) for each in seen)
    held_P = torch.arange(len(h_PD)) >= own if others else seen[0].held
    layer = _last_layer(model, target, seen, h_PD, text.unit, rank)
    calls = sum(len(each.rows.places()) for each in seen)
    return layer.scaled(text.fit(layer, held_P, again=not others)), calls


def readout(model: nn.Module, target: Target, seen: Sequence[Seen]) -> "Text":
    """Returns the loss of rows as a function of the inputs of the head.

    Raises:
        RequestError: the last layer, the target, does not write to these.
    """
    head, first = output_head(model), seen[0]
    if head is None or not first.record.h or first.record.h[0].shape[1] != output_size(target):
        raise _not_added(target)
    tokens_PK = torch.cat([each.tokens for each in seen])
    tokens_C, vocabulary = tokens_of(tokens_PK), int(head.out_features)  # type: ignore[arg-type]
    weight_XD, bias_X = first.rows.head_rows(model, with_others(tokens_C, vocabulary), first.record.like)
    h_PD, said_PK = torch.cat([each.head_inputs for each in seen]), torch.cat([each.log_probs for each in seen])
    return Text(h_PD, (weight_XD, bias_X), tokens_C, tokens_PK, said_PK)


def _not_added(target: Target) -> RequestError:
    return RequestError(
        f"method.basis: the output of {target.name}, the last layer that is tuned, is not added to the input of an "
        "output head, which free text needs; choose others with method.targets, or set method.name=head-feedback."
    )


def _last_layer(
    model: nn.Module, target: Target, seen: Sequence[Seen], h_PD: Tensor, unit: float, rank: int
) -> LastLayer:
    """Returns the last layer, and how its outputs arrive at the head: another pass over the rows shows it."""
    squares = [square for each in seen for square in each.record.squares]
    size, moved = math.sqrt(sum(squares) / len(squares)), list[TextRecord]()
    for each in seen:
        moved.append(TextRecord([name_of(target)], target, NUDGE * size))
        with each.rows.watching(model, moved[-1]):
            each.rows.outputs(each.outputs)
    moved_PD = torch.cat([part for each in moved for part in each.h])
    gains = arrives(moved_PD - h_PD, torch.cat([part for each in moved for part in each.noise]))
    if gains is None:
        raise _not_added(target)
    gain_M, share_P = gains
    x_PI = torch.cat([each.inputs(name_of(target)) for each in seen]) * share_P.unsqueeze(1)
    return LastLayer(x_PI, h_PD, gain_M, unit, rank)


def arrives(change_PM: Tensor, noise_PM: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns g (M,) and s (P,); None if they explain less than `LEAST_ARRIVES` of the change of h."""
    gain_M = (change_PM * noise_PM).sum(0) / noise_PM.square().sum(0)
    arrived_PM = gain_M * noise_PM
    size_P = arrived_PM.square().sum(1).clamp_min(1e-30)
    share_P = (change_PM * arrived_PM).sum(1) / size_P
    missed_P = (change_PM - share_P.unsqueeze(1) * arrived_PM).square().sum(1)
    if float(missed_P.sum()) >= (1 - LEAST_ARRIVES) * float(change_PM.square().sum()):
        return None
    chance = float((missed_P / size_P).mean()) / change_PM.shape[1]  # the part of the variance of s that is noise
    places = max(0.0, 1 - chance / max(float(share_P.var(correction=0)), 1e-30))
    return gain_M, 1 + places * (share_P - 1)


def reciprocal(gain_M: Tensor) -> Tensor:
    """Returns 1 / g, 0 where g is small."""
    return torch.where(gain_M.abs() >= LEAST_GAIN * gain_M.abs().mean(), 1 / gain_M, 0.0)


def tokens_of(tokens_PK: Tensor) -> Tensor:
    """Returns the tokens whose scores may change, ascending: all right ones, and the most frequent likely ones."""
    right = torch.unique(tokens_PK[:, 0])
    every, count = torch.unique(tokens_PK, return_counts=True)
    order = every[count.argsort(descending=True, stable=True)]
    others = order[~torch.isin(order, right)][: max(0, MOST_CLASSES - len(right))]
    return torch.cat([right, others]).sort().values


def with_others(tokens_C: Tensor, vocabulary: int) -> Tensor:
    """Returns these tokens, and behind them `OTHERS` of the others, drawn at random."""
    shuffled_V = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    return torch.cat([tokens_C, shuffled_V[~torch.isin(shuffled_V, tokens_C)][:OTHERS]])


def size_of(x_PI: Tensor) -> float:
    """Returns the root mean square of all entries."""
    return float(x_PI.square().mean().sqrt().clamp_min(1e-30))


class Text:
    """Tokens of answers, and their loss as a function of the inputs of the head.

    Args:
        h_PD: inputs of the head, float32.
        head: (rows of the head for C tokens, and some others (C + S, D), their bias (C + S,)).
        tokens_C: the C tokens, ascending.
        tokens_PK: the right token and likely ones at each place.
        log_probs_PK: of these, by the model.

    Attributes:
        unit: change of an input of the head that changes scores by about 1.
    """

    def __init__(
        self,
        h_PD: Tensor,
        head: tuple[Tensor, Tensor],
        tokens_C: Tensor,
        tokens_PK: Tensor,
        log_probs_PK: Tensor,
    ) -> None:
        class_PK = torch.searchsorted(tokens_C, tokens_PK).clamp_max(len(tokens_C) - 1)
        self._right_P, self._count = class_PK[:, 0], len(tokens_C)
        weight_XD, bias_X = head
        z_PC = h_PD @ weight_XD[: self._count].T + bias_X[: self._count]
        own_PK = z_PC.gather(1, class_PK)
        aside_PK, said_PK = own_PK - own_PK[:, :1], log_probs_PK - log_probs_PK[:, :1]
        aside_PK = aside_PK * (tokens_C[class_PK] == tokens_PK)
        scale = float((aside_PK * said_PK).sum() / aside_PK.square().sum().clamp_min(1e-30))
        self._weight_XD, self._bias_X = scale * weight_XD, scale * bias_X
        norm_P = scale * own_PK[:, 0] - log_probs_PK[:, 0]  # the logarithm of the sum over the vocabulary
        rest_P = 1 - (scale * z_PC - norm_P.unsqueeze(1)).exp().sum(1)
        said_P = (h_PD @ self._weight_XD[self._count :].T + self._bias_X[self._count :]).logsumexp(1)
        self._rest_P = norm_P + rest_P.clamp_min(RARE).log() - torch.where(said_P.isfinite(), said_P, 0.0)
        apart_CD = self._weight_XD[: self._count] - self._weight_XD[: self._count].mean(0)
        self.unit = 1 / float(apart_CD.square().sum(1).mean().sqrt().clamp_min(1e-30))

    def loss(self, h_PD: Tensor, places_P: Tensor, weight_P: Tensor | None = None) -> Tensor:
        """Returns the mean loss of some places, whose inputs of the head are these, each times its weight if given."""
        z_PX = h_PD @ self._weight_XD.T + self._bias_X
        rest_P = self._rest_P[places_P]
        if self._count < z_PX.shape[1]:
            rest_P = rest_P + z_PX[:, self._count :].logsumexp(1)
        z_PC = torch.cat([z_PX[:, : self._count], rest_P.unsqueeze(1)], 1)
        if weight_P is None:
            return functional.cross_entropy(z_PC, self._right_P[places_P])
        return (weight_P * functional.cross_entropy(z_PC, self._right_P[places_P], reduction="none")).mean()

    def fit(self, layer: LastLayer, held_P: Tensor, *, again: bool) -> Pair:
        """Returns factors in the units of Adam; U is 0 where nothing is gained on held-out places.

        Args:
            layer: the inputs of the head as a function of the factors.
            held_P: bool, which places are held out.
            again: whether all places are fitted in the end, in as many steps.
        """
        held, fitted = held_P.nonzero()[:, 0], (~held_P).nonzero()[:, 0]
        best, epochs, found = torch.inf, 0, layer.start
        for epoch, (u_DR, v_IR) in enumerate(self._epochs(layer, fitted) if len(fitted) else ()):
            now = self._mean_loss(layer, (u_DR, v_IR), held)
            if now < best:
                best, epochs, found = now, epoch, (u_DR.detach().clone(), v_IR.detach().clone())
            elif epoch >= epochs + PATIENCE:
                break
        if not again:
            return found
        epochs = math.ceil(epochs * len(fitted) / len(held_P))
        u_DR, v_IR = next(itertools.islice(self._epochs(layer, torch.arange(len(held_P))), epochs, None))
        return u_DR.detach(), v_IR.detach()

    @torch.no_grad()
    def _mean_loss(self, layer: LastLayer, factors: Pair, places_P: Tensor) -> float:
        parts = torch.split(places_P, SEEN_AT_ONCE)
        return sum(float(self.loss(layer.of(factors, part), part)) * len(part) for part in parts) / len(places_P)

    def _epochs(self, layer: LastLayer, places_P: Tensor) -> Iterator[Pair]:
        """Yields factors at the start and after each pass over these places."""
        u_DR, v_IR = (factor.clone().requires_grad_() for factor in layer.start)
        adam = torch.optim.Adam([u_DR, v_IR], lr=RATE)
        generator = torch.Generator().manual_seed(0)
        yield u_DR, v_IR
        for _ in range(EPOCHS):
            for part in torch.split(places_P[torch.randperm(len(places_P), generator=generator)], AT_ONCE):
                let_interrupt()
                with torch.enable_grad():
                    loss = self.loss(layer.of((u_DR, v_IR), part), part)
                    u_DR.grad, v_IR.grad = torch.autograd.grad(loss, [u_DR, v_IR])
                adam.step()
            yield u_DR, v_IR


def leading(x_PI: Tensor, rank: int) -> Tensor:
    """Returns the leading directions of x, (I, r), along which x has mean square 1 / r; 0 beyond the rank of x."""
    x_PI = x_PI.double() / len(x_PI) ** 0.5
    wide = len(x_PI) < x_PI.shape[1]
    values, vectors = torch.linalg.eigh(x_PI @ x_PI.T if wide else x_PI.T @ x_PI)
    values_R, vectors_XR = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    along_IR = x_PI.T @ vectors_XR / values_R.clamp_min(1e-30).sqrt() if wide else vectors_XR
    sizes_R = torch.where(values_R > 1e-9 * values_R[0], (values_R * rank).rsqrt(), 0.0)
    return functional.pad(along_IR * sizes_R, (0, rank - len(sizes_R))).float()
