"""Free text: a regression through the output head finds the change of the last layer that makes the rows likelier.

A pass over P tokens of answers gives the inputs x_p of the last layer, the inputs h_p of the output head, and how
likely C tokens are there: the right ones, and those that are likely somewhere. A second pass adds noise n_p to the
outputs of the layer, and the change d_p of h shows how much of each output arrives at each place:

    g_m = sum_p d_pm n_pm / sum_p n_pm^2,   s_p = sum_m d_pm g_m n_pm / sum_m (g_m n_pm)^2,

s shrunk towards 1 as far as it differs by chance.
With W + U V^T in place of W the scores of these tokens are then nearly

    z_pc = k H_c . N(h_p + g * (U V^T s_p x_p)),

H_c the rows of the head, k the factor by which the model scales its scores, N the last norm, which keeps the length of
h / g; the sum of exp z over all other tokens grows as that over some of them drawn at random. So U (M x r) and V (I x
r) are a multinomial regression on x, and no pass of the model is needed to fit it: Adam, from U = 0 and the leading
directions of x, along which its mean square is 1 / r. It ends where the loss of a quarter of the examples, held out, is
lowest, and is done once more with all of them, in as many steps.
"""

import itertools
import math
from collections.abc import Iterator
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
from tezo.newton.recording import NUDGE
from tezo.optim.closures import RowOutputs
from tezo.system.errors import RequestError

MOST_TOKENS = 4096
"""Tokens of answers that are kept, evenly spaced among all: with I + D numbers each, in float32."""
MOST_CLASSES, OTHERS = 4096, 512
"""Tokens whose scores are followed one by one, at most, unless more are right somewhere; and how many of all others."""
HELD_OUT = 4
"""One of so many examples is held out, to end by."""
EPOCHS, PATIENCE, AT_ONCE = 40, 3, 128
"""Most passes over the tokens, those without a gain, and tokens of a step."""
RATE = 4e-3
"""Rate of Adam, in units of V^T x, and of scores: in a trial on completions with a decoder of 135M parameters, 0.002
came to nearly the same on other rows, and 0.01 to a little less."""
LEAST_ARRIVES = 0.25
"""Least part of the change of h that g explains."""
LEAST_GAIN = 0.05
"""Outputs of which a smaller part arrives than this part of the mean are not changed."""


class TextRecord(Watcher):
    """Keeps the inputs of the last layer and of the head at places; adds noise to the layer's outputs.

    Args:
        target: the layer.
        size: root mean square of the noise; 0: there is none.

    Attributes:
        place: numbers of the places, (P,) for each pass.
        x: inputs of the layer, (P, I) for each pass, in float32 on the CPU.
        h: inputs of the head, (P, D), likewise.
        noise: noise added to the outputs of the layer, (P, M); nothing, if none was added.
        squares: mean squares of the layer's outputs.
        like: a tensor of no rows, and of the type and on the device of the head's inputs.
    """

    most, flattened = MOST_TOKENS, True

    def __init__(self, target: Target, size: float = 0.0) -> None:
        self._target, self._layer, self._size, self._passes = target, target.sites[0].name, size, 0
        self.inputs, self.adds = [self._layer, HEAD], [self._layer] if size else []
        self.place: list[Tensor] = []
        self.x: list[Tensor] = []
        self.h: list[Tensor] = []
        self.noise: list[Tensor] = []
        self.squares: list[float] = []
        self.like = torch.zeros(0)

    def begin(self) -> None:
        self._passes += 1

    def added(self, layer: str, places: Places, tokens: int) -> Tensor:
        del layer
        shape = len(places.example_R), tokens, output_size(self._target)
        noise_RLM = self._size * normal(shape, seed=0, step=self._passes, name=self._target.name, role="nudge").float()
        self.noise.append(at_places(noise_RLM, places))
        return noise_RLM

    def take(self, layer: str, places: Places, inputs: LayerInputs) -> None:
        assert inputs.at_PI is not None
        own = inputs.at_PI.float().cpu()
        if layer == HEAD:
            self.h.append(own)
            self.like = inputs.at_PI[:0]
        else:
            self.place.append(places.place_P)
            self.x.append(own)
            self.squares.append(inputs.output_square)


def fits_text(model: Any) -> bool:
    """Returns whether the last layers of a transformers model can write to the inputs of its output head."""
    return bool(getattr(output_head(model), "in_features", 0) == model.config.get_text_config().hidden_size)


def fit_text(
    model: nn.Module, target: Target, rows: RowOutputs, before: TextRecord, outputs: Outputs, rank: int
) -> tuple[Tensor, Tensor]:
    """Returns (U (M, r), V (I, r)) of the last layer, float64; see the module. It takes another pass over the rows.

    Args:
        model: the model.
        target: the last layer.
        rows: the rows.
        before: of a pass over them.
        outputs: of that pass.
        rank: r.

    Raises:
        RequestError: the layer does not write to the input of the head.
    """
    head, gains = output_head(model), None
    if head is not None and before.h and before.h[0].shape[1] == output_size(target):
        size = math.sqrt(sum(before.squares) / len(before.squares))
        moved = TextRecord(target, NUDGE * size)
        with rows.watching(model, moved):
            rows.outputs(outputs)
        gains = arrives(torch.cat(moved.h) - torch.cat(before.h), torch.cat(moved.noise))
    if head is None or gains is None:
        raise RequestError(
            f"method.basis: the output of {target.name}, the last layer that is tuned, is not added to the input of an "
            "output head, which free text needs; choose others with method.targets, or set method.name=head-feedback."
        )
    assert outputs.tokens_TC is not None
    (gain_M, share_P), place_P = gains, torch.cat(before.place)
    x_PI, h_PD = torch.cat(before.x) * share_P.unsqueeze(1), torch.cat(before.h)
    tokens_PK = outputs.tokens_TC.cpu()[place_P, :-1]
    tokens_C = tokens_of(tokens_PK)
    vocabulary: Any = head.out_features
    (weight_XD, bias_X), count = rows.head_rows(model, with_others(tokens_C, vocabulary), before.like), len(tokens_C)
    head_of = weight_XD[:count], bias_X[:count], weight_XD[count:]
    text = Text(x_PI, h_PD, gain_M, head_of, tokens_C, tokens_PK, outputs.scores_TC.cpu()[place_P, :-1].float())
    u_DR, v_IR = text.fit(outputs.example_T[place_P].cpu(), rank)
    return reciprocal(gain_M).double().unsqueeze(1) * u_DR.double(), v_IR.double()


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


class Text:
    """Tokens of answers, and the scores of the head there as a function of U and V.

    Args:
        x_PI: inputs of the layer, float32.
        h_PD: inputs of the head, float32.
        gain_D: g.
        head: (rows of the head for C tokens (C, D), their bias (C,), rows for some others).
        tokens_C: these tokens, ascending.
        tokens_PK: the right token and likely ones at each place.
        log_probs_PK: of these, by the model.
    """

    def __init__(
        self,
        x_PI: Tensor,
        h_PD: Tensor,
        gain_D: Tensor,
        head: tuple[Tensor, Tensor, Tensor],
        tokens_C: Tensor,
        tokens_PK: Tensor,
        log_probs_PK: Tensor,
    ) -> None:
        class_PK = torch.searchsorted(tokens_C, tokens_PK).clamp_max(len(tokens_C) - 1)
        self._right_P = class_PK[:, 0]
        weight_CD, bias_C, others_SD = head
        self._h_PD, self._per_D = h_PD, reciprocal(gain_D)
        self._length_P = torch.linalg.vector_norm(h_PD * self._per_D, dim=1)
        z_PC = h_PD @ weight_CD.T + bias_C
        own_PK = z_PC.gather(1, class_PK)
        aside_PK, said_PK = own_PK - own_PK[:, :1], log_probs_PK - log_probs_PK[:, :1]
        aside_PK = aside_PK * (tokens_C[class_PK] == tokens_PK)
        scale = float((aside_PK * said_PK).sum() / aside_PK.square().sum().clamp_min(1e-30))
        self._bias_C, self._weight_CD, self._others_SD = scale * bias_C, scale * weight_CD, scale * others_SD
        norm_P = scale * own_PK[:, 0] - log_probs_PK[:, 0]  # the logarithm of the sum over the vocabulary
        rest_P = 1 - (scale * z_PC - norm_P.unsqueeze(1)).exp().sum(1)
        self._rest_P = norm_P + rest_P.clamp_min(RARE).log()
        self._size = float(x_PI.square().mean().sqrt().clamp_min(1e-30))
        self._x_PI = x_PI / self._size
        apart_CD = self._weight_CD - self._weight_CD.mean(0)
        self._unit = 1 / float(apart_CD.square().sum(1).mean().sqrt().clamp_min(1e-30))

    def loss(self, u_DR: Tensor, v_IR: Tensor, places_P: Tensor) -> Tensor:
        """Returns the mean loss of some places, U and V in the units of Adam."""
        own_PD, rest_P = self._h_PD[places_P], self._rest_P[places_P]
        h_PD = own_PD + self._unit * (self._x_PI[places_P] @ v_IR) @ u_DR.T
        longer_P = torch.linalg.vector_norm(h_PD * self._per_D, dim=1) / self._length_P[places_P]
        h_PD = h_PD / longer_P.unsqueeze(1)
        if count := len(self._others_SD):
            rest_P = rest_P + ((h_PD - own_PD) @ self._others_SD.T).logsumexp(1) - math.log(count)
        z_PC = h_PD @ self._weight_CD.T + self._bias_C
        return functional.cross_entropy(torch.cat([z_PC, rest_P.unsqueeze(1)], 1), self._right_P[places_P])

    def fit(self, example_P: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Returns (U in the coordinates of h (D, r), V (I, r)); U is 0 where nothing is gained on unseen examples."""
        _, number_P = torch.unique(example_P, return_inverse=True)
        held_P = number_P % HELD_OUT == 0
        held, fitted = held_P.nonzero()[:, 0], (~held_P).nonzero()[:, 0]
        best, epochs = torch.inf, 0
        for epoch, (u_DR, v_IR) in enumerate(self._epochs(fitted, rank) if len(fitted) else ()):
            with torch.no_grad():
                now = float(self.loss(u_DR, v_IR, held))
            if now < best:
                best, epochs = now, epoch
            elif epoch >= epochs + PATIENCE:
                break
        epochs = math.ceil(epochs * len(fitted) / len(held_P))
        u_DR, v_IR = next(itertools.islice(self._epochs(torch.arange(len(held_P)), rank), epochs, None))
        return self._unit * u_DR.detach(), v_IR.detach() / self._size

    def _epochs(self, places_P: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (U, V) at the start and after each pass over these places."""
        v_IR = leading(self._x_PI[places_P], rank).requires_grad_()
        u_DR = torch.zeros(self._weight_CD.shape[1], rank, requires_grad=True)
        adam = torch.optim.Adam([u_DR, v_IR], lr=RATE)
        generator = torch.Generator().manual_seed(0)
        yield u_DR, v_IR
        for _ in range(EPOCHS):
            for part in torch.split(places_P[torch.randperm(len(places_P), generator=generator)], AT_ONCE):
                with torch.enable_grad():
                    u_DR.grad, v_IR.grad = torch.autograd.grad(self.loss(u_DR, v_IR, part), [u_DR, v_IR])
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
