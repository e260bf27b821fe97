"""Watchers of layers while rows are passed: they record inputs at the places of outputs, or add vectors to outputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional

from tezo.directions.bases.basis import output_size
from tezo.directions.outputs import Outputs, Places, change
from tezo.directions.random import normal
from tezo.directions.targets import Target
from tezo.forward.engine import LayerInputs
from tezo.forward.watching import Watcher, are_averaged
from tezo.optim.closures import RowOutputs

MOST_PLACES = 1024
"""Places of which inputs are kept, evenly spaced among all."""
NUDGE = 0.1
"""Size of the random vectors that are added to outputs of the last layer, as a part of theirs."""
NUDGE_RIDGE = 0.3
"""mu of `AddedVectors.measured`, as a part of the mean of the diagonal of N N^T."""
CONSTANT_RIDGES = (0.1, 1.0, 10.0, 100.0)
"""Candidates for mu of `Inputs.constant`, as parts of the mean of the diagonal of X X^T."""
PUSH = 0.3
"""By how much a class's score should be raised where layers are tried."""
KEPT_EFFECT = 0.3
"""Least effect of a vector at a layer, as a part of its effect at the last one."""
NUDGES = 128
"""Random vectors that S is measured with at a layer, at least; few rows have several each."""
TRIES = 128
"""Rows in which layers are tried, at least; few rows are passed several times."""
KNOWN = 0.1
"""S is known where predictions of unseen changes of scores by it have at least this correlation with them."""
LEAST_SLOPE = 0.1
"""Least slope of changes of scores over these predictions at the last layer, whose S is taken as it is."""


@dataclass
class Inputs:
    """Inputs of the layers that share them, at the places of all passes.

    Attributes:
        at: inputs at the place, (P, I) for each pass, in half precision, less their mean in the first one.
        mean: likewise the means over the tokens that the place depends on, itself among them.
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
        shown = [(values.float(), kept) for values, kept in ((at, self.at), (mean, self.mean)) if values is not None]
        if not self.means:
            self.means = [values.mean(0) for values, _ in shown]
        for (values, kept), mean_I in zip(shown, self.means, strict=True):
            kept.append((values - mean_I).clamp(-6e4, 6e4).half().cpu())
        self.place.append(place.cpu())

    def kinds(self) -> list[Tensor]:
        """Returns the inputs at the place and the means, (P, I) each in float64, as far as there are any."""
        found = [torch.cat(kept).double() for kept in (self.at, self.mean) if kept]
        return [part_PI + mean_I.double().cpu() for part_PI, mean_I in zip(found, self.means, strict=True)]

    def varying(self) -> list[Tensor]:
        """Returns `kinds` in float32, less their projection on the averages of both.

        A factor V that is a sum of such inputs has V^T x = 0 on average at either kind of tokens. So it moves the
        scores of rows apart, and those of no class as a whole, which is for biases to do.
        """
        found = self.kinds()
        basis_IK = torch.linalg.qr(torch.stack([part_PI.mean(0) for part_PI in found], 1)).Q
        return [(part_PI - part_PI @ basis_IK @ basis_IK.T).float() for part_PI in found]

    def constant(self) -> Tensor:
        """Returns w (I,) in float64 with w^T x_p about 1 at all places: at them, or else for their means.

        w is in the direction of X^T (X X^T + mu I)^-1 1, the ridge regression of 1 on the inputs, and the mean of
        w^T x_p is 1. mu predicts 1 best at places that the regression has not had. Of inputs that have nothing in
        common it is the largest, and w nearly along their mean.
        """
        x_PI = self.kinds()[0]
        gram_PP = x_PI @ x_PI.T
        fits = [_inverse(gram_PP, ridge) for ridge in CONSTANT_RIDGES]
        best_PP = min(fits, key=lambda inverse_PP: float((inverse_PP.sum(1) / inverse_PP.diagonal()).square().sum()))
        w_I = (x_PI.T @ best_PP).sum(1)
        return w_I / (x_PI @ w_I).mean()


class Tokens(Enum):
    """Tokens of a row by what scores depend on: those at the place, or all others."""

    PLACE = "place"
    OTHERS = "others"


@dataclass(frozen=True)
class ClassVectors:
    """Vectors by which outputs of some layers raise the score of each class.

    Attributes:
        vectors: name of a layer -> S for its outputs at the place and at all other tokens, of those that there are,
            (K, M, C) in float64; added to these outputs, it raises the score by 1. Zeros: no vector is known to.
            Layers whose vectors were measured at one of them share a tensor. In the order of the model.
    """

    vectors: Mapping[str, Tensor]

    @property
    def layers(self) -> list[str]:
        """Names of the layers."""
        return [*self.vectors]

    @property
    def kinds(self) -> int:
        """K, of tokens."""
        return len(next(iter(self.vectors.values())))

    def reach(self, layer: str) -> Tensor:
        """Returns how far outputs of each kind move scores: the square of the gradient there, (K,)."""
        square_K = self.vectors[layer].square().sum(1).mean(1)
        return torch.where(square_K > 0, 1 / square_K, 0.0)


def raising(gradient_MC: Tensor, slope: float = 1.0) -> Tensor:
    """Returns S = (1 - 1 / C) g / (e |g|^2), (M, C), one vector for each class, which raises its score by 1.

    With e = 1 it is its own inverse: of S it returns g.

    Args:
        gradient_MC: g, by the outputs of a layer, of each score less the mean of all.
        slope: e, of real changes of scores over those that g predicts.
    """
    rise = (1 - 1 / gradient_MC.shape[1]) / slope
    return rise * gradient_MC / gradient_MC.square().sum(0, keepdim=True).clamp_min(1e-30)


class AddedVectors:
    """Measures how vectors that are added to outputs of layers act on the scores of labels.

    Args:
        model: the model.
        rows: rows with labels.
        outputs: of these rows, with nothing added.
        step: of the draws.
    """

    def __init__(self, model: nn.Module, rows: RowOutputs, outputs: Outputs, step: int) -> None:
        self._model, self._rows, self._outputs, self._step = model, rows, outputs, step
        places = [each for each in rows.places() if each is not None]
        have_place = not any(bool((each.position_P < 0).any()) for each in places)
        self._tokens = [Tokens.PLACE] * have_place + [Tokens.OTHERS] * all(are_averaged(each) for each in places)
        self.passes = 0

    def class_vectors(self, targets: Sequence[Target], size: Callable[[str], float], depths: int) -> ClassVectors:
        """Returns the vectors of those layers at which what raises a class at the last one does so too.

        Random vectors are added at so many `depths`, evenly spaced among these layers, and each layer has the vectors
        of the nearest depth. At the outputs of the last layer all tokens but the place have none.

        Args:
            targets: layers with outputs of one size, in the order of the model.
            size: root mean square of the outputs of a layer.
            depths: number of layers at which vectors are measured, at most.
        """
        last_MC = self.measured(targets[-1], size(targets[-1].name), self._tokens[0], is_last=True)
        acting = self.acting(targets, {target.name: last_MC for target in targets}) or [targets[-1]]
        others = [torch.zeros_like(last_MC)] * (len(self._tokens) - 1)
        found = {len(acting) - 1: torch.stack([last_MC, *others])}
        for depth in range(1, depths):
            place = (len(acting) - 1) * (depths - 1 - depth) // (depths - 1)
            if place not in found:
                of_tokens = [self.measured(acting[place], size(acting[place].name), each) for each in self._tokens]
                found[place] = torch.stack(of_tokens)

        def nearest(place: int) -> int:
            return min(found, key=lambda other: abs(other - place))

        return ClassVectors({target.name: found[nearest(place)] for place, target in enumerate(acting)})

    def measured(self, target: Target, size: float, tokens: Tokens, *, is_last: bool = False) -> Tensor:
        """Returns S (M, C), one vector for each class, which raises its score by 1: float64.

        A random vector n_p is added to the output of a layer in the row of each example, `NUDGES` in all; d_p is the
        change of the scores of the C classes, less their mean:

            G = N^T K D,   K = (N N^T + mu I)^-1,   S = (1 - 1 / C) G / (e |G|^2),   (M, C),

        with e the slope of d_p over the prediction n_p G by the other rows, d_p - (K D)_p / K_pp. A score that rises
        by 1 does so by 1 - 1 / C less the mean.

        Args:
            target: the layer.
            size: root mean square of its outputs.
            tokens: whose outputs have the vector added.
            is_last: whether it is the last layer, through which all scores are raised.
        """
        shape = len(self._outputs.labels_T), output_size(target)
        added, raised = [], []
        for turn in range(max(1, math.ceil(NUDGES / shape[0]))):
            role = f"nudge of {tokens.value}, {turn}"
            added.append(normal(shape, seed=0, step=self._step, name=target.name, role=role).double() * NUDGE * size)
            raised.append(self._raised({target.name: target}, {target.name: added[-1]}, tokens))
        added_TM, raised_TC = torch.cat(added), torch.cat(raised)
        inverse_TT = _inverse(added_TM @ added_TM.T, NUDGE_RIDGE)
        alpha_TC = inverse_TT @ raised_TC
        unseen_TC = raised_TC - alpha_TC / inverse_TT.diagonal().unsqueeze(1)
        gradient_MC, size_of_unseen = added_TM.T @ alpha_TC, float(torch.linalg.vector_norm(unseen_TC))
        along = float((raised_TC * unseen_TC).sum()) / max(size_of_unseen, 1e-300)
        if not is_last and along <= KNOWN * float(torch.linalg.vector_norm(raised_TC)):
            return torch.zeros_like(gradient_MC)
        slope = along / max(size_of_unseen, 1e-300)
        return raising(gradient_MC, max(slope, LEAST_SLOPE) if is_last else slope)

    def acting(self, targets: Sequence[Target], vectors: Mapping[str, Tensor]) -> list[Target]:
        """Returns the layers at whose outputs S has at least `KEPT_EFFECT` of its effect at the last one.

        S of one layer is added in the row of each example, each layer in turn, `TRIES` times in all. None are returned
        where S does not act at the last layer.

        Args:
            targets: layers, in the order of the model.
            vectors: S of each, (M, C).
        """
        count, classes = len(self._outputs.labels_T), self._outputs.scores_TC.shape[1]
        turn_X = torch.arange(count * math.ceil(max(TRIES, len(targets)) / count))
        class_X = (turn_X // len(targets)) % classes
        wanted_XC = PUSH * (functional.one_hot(class_X, classes).double() - 1 / classes)
        raised = []
        for turn_T, class_T in zip(torch.split(turn_X, count), torch.split(class_X, count), strict=True):
            is_at = [(turn_T % len(targets) == i).unsqueeze(1) for i in range(len(targets))]
            added = {t.name: PUSH * vectors[t.name].T[class_T] * at for t, at in zip(targets, is_at, strict=True)}
            raised.append(self._raised({t.name: t for t in targets}, added, None))
        effect_X = (torch.cat(raised) * wanted_XC).sum(1) / wanted_XC.square().sum(1)
        effects = [float(effect_X[turn_X % len(targets) == i].mean()) for i in range(len(targets))]
        if not effects[-1] >= KEPT_EFFECT:
            return []
        return [t for t, effect in zip(targets, effects, strict=True) if effect >= KEPT_EFFECT * effects[-1]]

    def _raised(self, targets: Mapping[str, Target], added: Mapping[str, Tensor], tokens: Tokens | None) -> Tensor:
        """Returns the changes of the scores (T, C), less their mean over the classes, with vectors added."""
        adding = _Adding({target.sites[0].name: added[name] for name, target in targets.items()}, tokens)
        with self._rows.watching(self._model, adding):
            moved = self._rows.outputs(self._outputs)
        self.passes += adding.passes
        raised_TC = change(moved, self._outputs)
        return raised_TC - raised_TC.mean(1, keepdim=True)


class _Adding(Watcher):
    """Adds a vector to the output of layers in all rows of an example, at these tokens or all; (T, M) of each layer."""

    def __init__(self, added: Mapping[str, Tensor], tokens: Tokens | None) -> None:
        self._added, self.adds, self._tokens = added, [*added], tokens

    def added(self, layer: str, places: Places, tokens: int) -> Tensor:
        vector_R1M = self._added[layer][places.example_R.cpu()].unsqueeze(1)
        if self._tokens is None:
            return vector_R1M
        # all rows of an example begin alike, and an engine computes what they share once
        of_example_PR = places.example_R[places.row_P].unsqueeze(1) == places.example_R
        place_X, row_X = of_example_PR[places.position_P >= 0].cpu().nonzero(as_tuple=True)
        is_place_RL = torch.zeros(len(vector_R1M), tokens, dtype=torch.bool)
        is_place_RL[row_X, places.position_P[places.position_P >= 0].cpu()[place_X]] = True
        return vector_R1M * (is_place_RL == (self._tokens is Tokens.PLACE)).unsqueeze(2)


def _inverse(gram_PP: Tensor, ridge: float) -> Tensor:
    """Returns (X X^T + mu I)^-1 of X X^T, with mu this part of the mean of its diagonal."""
    added_PP = gram_PP.clone()
    added_PP.diagonal().add_(ridge * float(gram_PP.diagonal().mean()) + 1e-12)
    return torch.cholesky_inverse(torch.linalg.cholesky(added_PP))


class InputRecorder(Watcher):
    """Records the inputs of layers at the places of outputs.

    Args:
        targets: the weights of the layers.

    Attributes:
        found: parameter name -> inputs of its layer, in the order in which layers are called.
    """

    most, means = MOST_PLACES, True

    def __init__(self, targets: Sequence[Target]) -> None:
        self._names = {target.sites[0].name: target.name for target in targets}
        self.inputs = [*self._names]
        self._last: dict[tuple[int, ...], tuple[Inputs, Tensor]] = {}
        self.found: dict[str, Inputs] = {}
        self._adds: set[str] = set()
        self._squares: dict[str, list[float]] = {}

    def begin(self) -> None:
        self._last.clear()

    def take(self, layer: str, places: Places, inputs: LayerInputs) -> None:
        name, at, mean = self._names[layer], inputs.at_PI, inputs.mean_PI
        shown = at if at is not None else mean
        assert shown is not None
        if name not in self.found:
            before = self._last.get(tuple(shown.shape))
            is_shared = before is not None and torch.equal(before[1], shown)
            self.found[name] = before[0] if is_shared and before is not None else Inputs()
            if not is_shared:
                self._adds.add(name)
        if name in self._adds:
            self.found[name].add(at, mean, places.place_P)
            self._last[tuple(shown.shape)] = self.found[name], shown
        self._squares.setdefault(name, []).append(inputs.output_square)

    def output_size(self, name: str) -> float:
        """Returns the root mean square of a layer's outputs."""
        return math.sqrt(sum(self._squares[name]) / len(self._squares[name]))


def finite(outputs: Outputs) -> Outputs:
    """Returns outputs; raises a `FloatingPointError` where their loss is NaN or infinite."""
    loss = outputs.loss()
    if not math.isfinite(loss):
        raise FloatingPointError(loss)
    return outputs
