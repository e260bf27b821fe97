"""Looks into the layers of a model while rows are passed: inputs are kept, and vectors are added to outputs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tezo.directions.outputs import Places
from tezo.directions.targets import only_input, output_head
from tezo.forward.engine import HEAD, LayerInputs
from tezo.forward.layers import alone
from tezo.system.errors import RequestError

HEAD_BYTES = 1 << 27
"""Bytes of outputs that are computed at a time to read rows of the head."""


class Watcher:
    """What a look does in each pass. Layers go by the names of their modules, the output head by `HEAD`.

    Attributes:
        inputs: layers whose inputs it is shown, in the order in which they are called.
        adds: layers to whose outputs it adds vectors.
        most: places at which it looks, of all passes together, evenly spaced; None: all.
        trail: tokens that it looks at for each place, the last ones up to it, but not a row's first; an engine, which
            shows what it is asked for, has the place alone.
        means: whether it is shown the means over the tokens that answers depend on.
        flattened: whether layers are watched whose inputs have no dimension of rows, as in OPT.
        passes: calls of the model so far; an engine may compute rows several times to look into them.
    """

    inputs: Sequence[str] = ()
    adds: Sequence[str] = ()
    most: int | None = None
    trail = 1
    means = False
    flattened = False
    passes = 0

    def begin(self) -> None:
        """Is called before each pass that has places."""
        return

    def added(self, layer: str, places: Places, tokens: int) -> Tensor:
        """Returns what is added to the output of a layer in each row of a pass, (R, tokens, M), or (R, 1, M) for all.

        Raises:
            NotImplementedError: it adds nothing.
        """
        raise NotImplementedError(layer)

    def take(self, layer: str, places: Places, inputs: LayerInputs) -> None:
        """Is shown the inputs of a layer in a pass."""
        del layer, places, inputs


class PassPlaces:
    """The places of each pass of a model in turn, of all passes at most so many, evenly spaced.

    `trail`: see `Watcher`.

    Attributes:
        now: those of the pass that is running; None: it has none.
    """

    def __init__(self, places: Sequence[Places | None], most: int | None = None, trail: int = 1) -> None:
        total = sum(len(each.place_P) for each in places if each is not None)
        self._stride = 1 if most is None else max(1, -(-total // most))
        self._passes, self._trail = iter(places), trail
        self.now: Places | None = None

    def enter(self, *_: object) -> None:
        """Called before each pass of the model."""
        places = next(self._passes, None)
        if places is not None:
            kept = places.place_P % self._stride == 0
            before_PL = torch.arange(1 - self._trail, 1).expand(int(kept.sum()), -1)
            position_PL = places.position_P[kept].unsqueeze(1) + before_PL.to(places.position_P.device)
            is_seen_PL = (position_PL > 0) | (before_PL == 0).to(position_PL.device)
            row_P, stop_P, place_P = (
                each[kept].unsqueeze(1).expand_as(position_PL)[is_seen_PL]
                for each in (places.row_P, places.stop_P, places.place_P)
            )
            places = Places(row_P, position_PL[is_seen_PL], stop_P, place_P, places.example_R)
        self.now = places if places is not None and len(places.place_P) else None


@contextmanager
def hooked(model: nn.Module, watcher: Watcher, places: Sequence[Places | None]) -> Iterator[None]:
    """While open, a watcher looks into the passes of the model's modules, which have these places one after another."""
    passes = PassPlaces(places, watcher.most, watcher.trail)

    def enter(*_: object) -> None:
        watcher.passes += 1
        passes.enter()
        if passes.now is not None:
            watcher.begin()

    def layer(name: str, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        del module
        now, x = passes.now, only_input(args, kwargs)
        x_RLI = None if now is None else by_row(x, len(now.example_R)) if watcher.flattened else x
        if now is None or x_RLI is None or x_RLI.ndim != 3 or len(x_RLI) != len(now.example_R):
            return None
        if name in watcher.inputs:
            at, mean = _at(x_RLI, now), _mean(x_RLI, now) if watcher.means else None
            out_RLM = output.view(*x_RLI.shape[:2], output.shape[-1])
            out = _at(out_RLM, now) if at is not None else _mean(out_RLM, now)
            if at is not None or mean is not None:
                square = 0.0 if out is None else float(out.float().square().mean())
                watcher.take(name, now, LayerInputs(at, mean, square))
        if name not in watcher.adds:
            return None
        added = watcher.added(name, now, x_RLI.shape[1]).to(output.device, output.dtype)
        return output + (added if output.ndim == 3 else added.reshape(output.shape))

    def head(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        del module
        now = passes.now
        if now is not None and len(args[0]) == len(now.example_R):
            watcher.take(HEAD, now, LayerInputs(at_places(args[0], now), None, 0.0))

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(enter))
        for name in dict.fromkeys([*watcher.inputs, *watcher.adds]):
            if name != HEAD:
                module = model.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(partial(layer, name), with_kwargs=True))
        outer = output_head(model) if HEAD in watcher.inputs else None
        if outer is not None:
            hooks.enter_context(outer.register_forward_pre_hook(head))
        yield


def by_row(x: Tensor, rows: int) -> Tensor | None:
    """Returns the inputs of a layer by rows of the pass, (R, L, I), from (R L, I) too, as in OPT; else None."""
    if x.ndim == 2 and len(x) > rows and len(x) % rows == 0:
        x = x.view(rows, -1, x.shape[-1])
    return x if x.ndim == 3 and len(x) == rows else None


def _at(x_RLI: Tensor, places: Places) -> Tensor | None:
    """Returns the vectors at the places, (P, I); None if the places have no position."""
    return None if bool((places.position_P < 0).any()) else at_places(x_RLI, places)


def at_places(x_RLI: Tensor, places: Places) -> Tensor:
    """Returns the vectors at the places, (P, I)."""
    device = x_RLI.device
    return x_RLI[places.row_P.to(device), places.position_P.to(device)].detach()


def _mean(x_RLI: Tensor, places: Places) -> Tensor | None:
    """Returns the means over the tokens that answers depend on, (P, I); None if they are not averaged."""
    if not are_averaged(places):
        return None
    row_P, stop_P = places.row_P.to(x_RLI.device), places.stop_P.to(x_RLI.device)
    weight_PL = (torch.arange(x_RLI.shape[1], device=x_RLI.device) < stop_P.unsqueeze(1)) / stop_P.unsqueeze(1)
    return torch.bmm(weight_PL.to(x_RLI.dtype).unsqueeze(1), x_RLI.detach()[row_P]).squeeze(1)


def are_averaged(places: Places) -> bool:
    """Returns whether the tokens that answers depend on are averaged."""
    return bool((places.stop_P > 0).all())


def head_rows(model: nn.Module, rows_X: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows of the output head (X, D), their trained change included, and their bias (X,): float32, on the CPU.

    They are the outputs for unit vectors of the size, type and device of `like` (..., D), which may have no entries.

    Args:
        model: the model.
        rows_X: which rows, (X,), int64.
        like: inputs of the head.

    Raises:
        RequestError: the model has no head.
    """
    head = output_head(model)
    if head is None:
        raise RequestError(f"{type(model).__name__} has no output head whose rows can be read; give another model.")
    eye_DD = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    bias_V = alone(head, torch.zeros_like(eye_DD[:1]))[0]
    own_X = rows_X.to(bias_V.device)
    parts = torch.split(eye_DD, max(1, HEAD_BYTES // (4 * len(bias_V))))
    found_XD = torch.cat([(alone(head, part) - bias_V)[:, own_X].float().cpu() for part in parts]).T
    return found_XD, bias_V[own_X].float().cpu()
