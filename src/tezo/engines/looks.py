"""Watching of layers on a server that shows states: their inputs at places, and vectors added to their outputs.

`states` has the equations. A text is passed under one adapter after another, until all K numbers of an input are read.
Vectors are added to a text by an adapter of its own.
"""

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tezo.engines.states import SeenLayer
from tezo.forward.engine import Asked, Change, LayerInputs, Told, Watch, Watched, joined
from tezo.system.errors import RequestError

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Texts with vectors of their own that are computed side by side."""
MOST_MISSED, MOST_THAT_MISS = 1.0, 0.25
"""A vector misses its tokens where it reaches others as much (`SeenLayer.for_tokens`); a warning is given where more
than a quarter of the vectors do."""
KEPT_BYTES = 1 << 28
"""Bytes of numbers that are kept of texts, for vectors that are added to them afterwards."""

T = TypeVar("T")
Text = tuple[int, ...]
States = Callable[[Change, Sequence[Text], Callable[[Tensor], Any]], list[Any]]
"""(change, texts, function of states (T, n, D)) -> its value for each text under this change."""
LogProbs = Callable[[Sequence[Change], Asked], list[Told]]


class Looks:
    """Watches layers whose inputs can be read.

    Args:
        layers: in the order in which they are called.
        room: largest rank of an adapter.
        states: asks the server.
        log_probs: likewise.
    """

    def __init__(self, layers: Sequence[SeenLayer], room: int, states: States, log_probs: LogProbs) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self._room, self._states, self._log_probs = room, states, log_probs
        self._of: Change = {}
        self._computed, self._has_warned = 0, False
        self._known: dict[tuple[str, Text], Tensor] = {}

    def watch(self, change: Change, asked: Asked, watch: Watch) -> Watched:
        """See `Engine.watch`; layers that cannot be read are left out."""
        if not _are_equal(change, self._of):
            self._of, self._known = change, {}
        self._computed = len(asked.texts)
        told = self._told(asked, watch.added) if watch.added else self._log_probs([change], asked)[0]
        layers = [layer for name, layer in self.layers.items() if name in watch.inputs]
        places = torch.arange(len(asked.text_P)) if watch.places is None else watch.places
        numbers, positions = asked.text_P[places].tolist(), asked.position_P[places].tolist()
        texts = list(dict.fromkeys(tuple(asked.texts[number]) for number in numbers)) if layers else []
        read, found = self._read(layers, texts), {}
        for layer in layers:
            of_places = [
                (read[layer.name, tuple(asked.texts[n])].float(), p) for n, p in zip(numbers, positions, strict=True)
            ]
            at_PI = layer.stand_in(torch.stack([x_TK[position] for x_TK, position in of_places]))
            mean_PI = None
            if watch.means:
                mean_PI = layer.stand_in(torch.stack([x_TK[: position + 1].mean(0) for x_TK, position in of_places]))
            found[layer.name] = LayerInputs(at_PI, mean_PI, layer.output**2)
        return Watched(told, found, math.ceil(self._computed / max(1, len(asked.texts))))

    def _read(self, layers: Sequence[SeenLayer], texts: Sequence[Text]) -> dict[tuple[str, Text], Tensor]:
        """Returns (layer, text) -> the numbers A x of its tokens (T, K), in half precision."""
        wanted = [(layer.name, text) for layer in layers for text in texts]
        read = {key: self._known[key] for key in wanted if key in self._known}
        missing = [text for text in texts if any((layer.name, text) not in read for layer in layers)]
        if not missing:
            return read

        def along_all(states_TND: Tensor) -> list[Tensor]:
            return [layer.along(states_TND, slice(None)) for layer in layers]

        before = self._asked(self._of, missing, along_all)
        for number, layer in enumerate(layers):
            parts = [self._part(layer, part, missing) for part in self._parts(layer)]
            for i, text in enumerate(missing):
                own_TK, aside_T1 = before[i][number][:, :-1], before[i][number][:, -1:]
                change_TK = torch.cat([of_texts[i][:, :-1] for of_texts in parts], 1) - own_TK
                # of all parts: under each of them what is aside stays
                asides_TP = torch.cat([of_texts[i][:, -1:] for of_texts in parts], 1) - aside_T1
                self._check(layer, change_TK, asides_TP.square().sum(1, keepdim=True).sqrt())
                x_TK = change_TK / layer.size
                read[layer.name, text] = x_TK.nan_to_num(0.0, 0.0, 0.0).bfloat16()  # zero where states overflow
        if sum(each.nbytes for each in {**self._known, **read}.values()) <= KEPT_BYTES:
            self._known |= read
        return read

    def _check(self, layer: SeenLayer, change_TK: Tensor, aside_T1: Tensor) -> None:
        if not layer.is_behind(torch.cat([change_TK, aside_T1], 1).nan_to_num(0.0, 0.0, 0.0)):
            raise RequestError(
                f"model.engine: the state that stood behind {layer.name} when the run began does not now: the server "
                "shows states of other blocks; start it as it was, and go on with --resume."
            )

    def _parts(self, layer: SeenLayer) -> Iterator[slice]:
        """Yields the parts of the K numbers that are read by an adapter each, beside the change of the layer."""
        own = self._of[layer.name][0].shape[0] if layer.name in self._of else 0
        count, most = len(layer.a_KI), max(1, self._room - own)
        for start in range(0, count, most):
            yield slice(start, min(start + most, count))

    def _part(self, layer: SeenLayer, part: slice, texts: Sequence[Text]) -> list[Tensor]:
        """Returns `SeenLayer.along` of each text, for this part of the columns of B, whose adapter it is under."""
        return self._asked(self._with(layer, *layer.adapter(part)), texts, partial(layer.along, part=part))

    def _asked(self, change: Change, texts: Sequence[Text], keep: Callable[[Tensor], T]) -> list[T]:
        self._computed += len(texts)
        return self._states(change, texts, keep)

    def _with(self, layer: SeenLayer, a_RI: Tensor, b_DR: Tensor) -> Change:
        """Returns the change with more factors of a layer."""
        if layer.name in self._of:
            own_a, own_b = self._of[layer.name]
            a_RI, b_DR = torch.cat([own_a, a_RI]), torch.cat([own_b, b_DR], 1)
        return {**self._of, layer.name: (a_RI, b_DR)}

    def _told(self, asked: Asked, added: Mapping[str, Sequence[Tensor]]) -> Told:
        """Returns the answer with vectors added to the outputs of layers."""
        changes = self._changes(asked, added)
        texts = asked.text_P.tolist()
        parts = [torch.tensor([place for place, of in enumerate(texts) if of == i]) for i in range(len(asked.texts))]

        def of_text(number: int) -> Told:
            place_P = parts[number]
            alone = Asked(
                [asked.texts[number]], torch.zeros_like(place_P), asked.position_P[place_P], asked.tokens_PC[place_P],
                asked.likely,
            )  # fmt: skip
            return self._log_probs([changes[number]], alone)[0]

        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = list(threads.map(of_text, range(len(asked.texts))))
        return joined(found).at(torch.cat(parts).argsort())

    def _changes(self, asked: Asked, added: Mapping[str, Sequence[Tensor]]) -> list[Change]:
        """Returns the change of each text, with an adapter for the vectors that are added to it."""
        changes: list[Change] = [self._of for _ in asked.texts]
        missed, lengths = list[float](), list[int]()
        for name, of_texts in added.items():
            layer = self.layers[name]
            some = [i for i, vectors in enumerate(of_texts) if bool(vectors.any())]
            read = self._read([layer], [tuple(asked.texts[i]) for i in some])
            for i in some:
                x_TK, vectors = read[name, tuple(asked.texts[i])].float(), of_texts[i]
                n_M = vectors[vectors.square().sum(1).argmax()]
                wanted_T = (vectors @ n_M / n_M.square().sum()).expand(len(x_TK))  # all have n, or zero
                v_I, by = layer.for_tokens(x_TK, wanted_T)
                missed.append(by)
                lengths.append(len(x_TK))
                more = self._with(layer, v_I.unsqueeze(0), n_M.float().unsqueeze(1))
                changes[i] = {**changes[i], name: more[name]}
        self._warn(missed, lengths)
        return changes

    def _warn(self, missed: Sequence[float], lengths: Sequence[int]) -> None:
        """Says once that vectors miss their tokens, by how much each does and the tokens of its text."""
        if self._has_warned or sum(by > MOST_MISSED for by in missed) <= MOST_THAT_MISS * len(missed):
            return
        self._has_warned = True
        logger.warning(
            "Looks by states add vectors at some tokens of a text, of whose inputs %d numbers are known. In texts as "
            "long as these (%.0f tokens, median) the vectors reach other tokens as much. Looks in torch, from a folder "
            "with weights, do not have this limit.",
            max(len(layer.a_KI) for layer in self.layers.values()), statistics.median(lengths),
        )  # fmt: skip


def _are_equal(one: Change, other: Change) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )
