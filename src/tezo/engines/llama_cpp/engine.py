"""llama.cpp as an engine: the GGUF file as it is, mapped into memory and never unpacked as a whole.

A change of the weights is a LoRA adapter in a file that only this process has, so that nothing is left by any end.
Texts are sequences of one context; tokens at their common beginning are computed once, for all of them.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tezo.engines.llama_cpp.file import GgufHeader
from tezo.engines.llama_cpp.model import Context, LlamaModel
from tezo.engines.llama_cpp.plan import MOST_TEXTS, Numbers, Part, Plan, part_of, plan_of
from tezo.engines.llama_cpp.tensors import WEIGHT, Tensors
from tezo.engines.llama_cpp.values import rows_of
from tezo.engines.llama_cpp.watching import Layer, Listing, Watching
from tezo.forward.engine import HEAD, Asked, Change, Continuing, Engine, Told, Watch, Watched, joined, told_by
from tezo.models.gguf import GGUF_FILE, FileNames, Names, in_gguf, write_gguf_lora
from tezo.system.errors import RequestError
from tezo.tasks.objectives.batch import packed_tree, plain_tree

GENERATED_AT_ONCE = 4096
"""Tokens of texts that are continued side by side, or one text."""
LISTED_TOKENS = 4
"""Tokens of the pass that lists layers. A recurrent state has another graph for one token."""
UNPACKED_AT_ONCE = 1 << 22
"""Values of a weight that are unpacked at a time for a product: 16 MB."""
BLOCK = "blk."
"""How the names of the weights inside of the model begin."""


class LlamaCpp(Engine):
    """A model of llama.cpp.

    Args:
        model: the model.
        names: how its modules are called in GGUF.
    """

    name = "llama.cpp"
    streams = True

    def __init__(self, model: LlamaModel, names: Names) -> None:
        self._model, self._names = model, names
        self._tensors = Tensors(model.lib)
        self._opened: Context | None = None

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        """The layers of the file by the names of their weights, in the order in which they are computed."""
        return self._listing.layers

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the weights inside of the model that can have a LoRA."""
        inside = [layer for name, layer in self.layers.items() if name.startswith(BLOCK)]
        if not inside:
            return frozenset()
        change = {
            layer.name.removesuffix(".weight"): (torch.zeros(1, layer.inputs), torch.zeros(layer.outputs, 1))
            for layer in inside
        }
        with own_file() as path:
            write_gguf_lora(path, 0, change, FileNames(self._names.architecture))
            return frozenset(self._listed(path).adapted)

    @cached_property
    def _listing(self) -> Listing:
        return self._listed(None)

    def _listed(self, adapter: str | None) -> Listing:
        token = self._model.lib.llama_vocab_bos(self._model.vocabulary)
        text = [max(0, token)] * LISTED_TOKENS
        part = part_of(plain_tree(text, [LISTED_TOKENS - 1]), 0, [0])
        listing, context = Listing(self._tensors, part), self._context(len(text), watched=True)
        context.forget()
        if adapter is None:
            context.logits(part, listing)
        else:
            with context.adapted(adapter):
                context.logits(part, listing)
        return listing

    def changes(self, module: str) -> bool:
        return self._weight(module) in self.adapted

    def watches(self, module: str) -> bool:
        name = self._weight(module)
        return name in self.layers and name not in self._listing.repeated

    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        plan = self._plan(asked)
        found = []
        for change in changes:
            with self._changed(change, plan.size) as context:
                found.append(_told(asked, plan, self._read(context, plan)))
        return found

    def watch(self, change: Change, asked: Asked, watch: Watch) -> Watched:
        names = {module: self._known(module) for module in (*watch.inputs, *watch.added)}
        plan = self._plan(asked)
        kept = range(len(plan.places)) if watch.places is None else watch.places.tolist()
        number = {place: i for i, place in enumerate(kept)}
        added = {
            names[module]: [self._names.to_gguf(module, vector.T).T for vector in vectors]
            for module, vectors in watch.added.items()
        }
        inputs = [names[module] for module in watch.inputs]
        watching = Watching(self._tensors, inputs, [number.get(place, -1) for place in plan.places], watch.means, added)
        every = watch.means and any(self.layers[name].at_outputs for name in inputs)
        with self._changed(change, plan.size, watched=True) as context:
            told = _told(asked, plan, self._read(context, plan, watching, every_output=every))
        found, modules = watching.found(), {names[module]: module for module in watch.inputs}
        return Watched(told, {modules[name]: vector for name, vector in found.items()})

    def hidden(self, change: Change, texts: Sequence[Sequence[int]]) -> Tensor:
        several = list(dict.fromkeys(map(tuple, texts)))
        places = torch.arange(len(several))
        position_P = torch.tensor([len(text) - 1 for text in several])
        asked = Asked(several, places, position_P, torch.zeros(len(several), 0, dtype=torch.int64), 0)
        found = self.watch(change, asked, Watch([HEAD])).inputs
        number, at_PI = {text: i for i, text in enumerate(several)}, found[HEAD].at_PI
        assert at_PI is not None
        return at_PI[[number[tuple(text)] for text in texts]]

    def head_rows(self, rows_X: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows(HEAD, rows_X)

    @torch.no_grad()
    def product(self, layer: str, x: Tensor, transposed: bool) -> Tensor:
        order_O, width = self._order(layer), self.layers[self._known(layer)].inputs
        found = x.new_zeros(len(x), width if transposed else len(order_O))
        for part_X in torch.split(torch.arange(len(order_O)), max(1, UNPACKED_AT_ONCE // width)):
            weight_XI, bias_X = self._rows(layer, order_O[part_X])
            if transposed:
                found += x[:, part_X] @ weight_XI
            else:
                found[:, part_X] = x @ weight_XI.T + bias_X
        return found

    def _order(self, layer: str) -> Tensor:
        """Returns the place of each row of a layer in the file, (O,): rows may have another order there."""
        every_O = torch.arange(self.layers[self._known(layer)].outputs)
        return self._names.to_gguf(layer, every_O.unsqueeze(1)).squeeze(1).argsort()

    def _rows(self, layer: str, stored_X: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows of a weight by their places in the file, (X, I), and their bias (X,), float32."""
        name, header, numbers_X = self._known(layer), self._header, stored_X.numpy()
        outputs = self.layers[name].outputs
        weight_XI = torch.from_numpy(rows_of(header, name, numbers_X, outputs))
        bias = name.removesuffix(WEIGHT) + ".bias"
        if bias not in header.tensors:
            return weight_XI, torch.zeros(len(numbers_X))
        return weight_XI, torch.from_numpy(rows_of(header, bias, numbers_X, outputs))[:, 0]

    @cached_property
    def _header(self) -> GgufHeader:
        return GgufHeader(self._model.path)

    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        return [self._generated(change, prompts, wanted) for change in changes]

    def stored(self, change: Change) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns a change by the names and in the order of rows that the file has.

        Raises:
            RequestError: a layer has no name there.
        """
        return in_gguf(change, self._names)

    def save_beside(self, rank: int, change: Change, folder: Path) -> str:
        write_gguf_lora(folder / GGUF_FILE, rank, change, self._names)
        return GGUF_FILE

    def _weight(self, module: str) -> str | None:
        """Returns the name of a module's weight in the file; None: it has none."""
        if module != HEAD:
            return self._names.name(f"{module}.weight")
        return next((name for name in reversed([*self.layers]) if not name.startswith(BLOCK)), None)

    def _known(self, module: str) -> str:
        name = self._weight(module)
        if name is None or not self.watches(module):
            raise RequestError(f"the inputs of {module} cannot be read from llama.cpp; leave it out of method.targets.")
        return name

    def _plan(self, asked: Asked) -> Plan:
        groups = None if asked.group_T is None else asked.group_T.tolist()
        places = asked.text_P.tolist(), asked.position_P.tolist()
        return plan_of(asked.texts, *places, groups, alone=self._model.one_text)

    def _generated(self, change: Change, prompts: Sequence[Sequence[int]], wanted: Continuing) -> list[list[int]]:
        many = max(1, min(MOST_TEXTS, GENERATED_AT_ONCE // (max(map(len, prompts)) + wanted.most)))
        many = 1 if self._model.one_text else many
        written: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(prompts), many):
            rows = range(start, min(start + many, len(prompts)))
            tree = packed_tree([prompts[i] for i in rows], [[len(prompts[i]) - 1] for i in rows])
            part, slots = part_of(tree, 0, list(rows)), [places[0] for places in tree.slots]
            with self._changed(change, len(part.token_T) + len(rows) * wanted.most) as context:
                _continue(context, part, slots, prompts, written, rows, wanted)
        return written

    @contextmanager
    def _changed(self, change: Change, tokens: int, *, watched: bool = False) -> Iterator[Context]:
        """Yields a context for so many tokens, in which the weights have a change while it is open."""
        context = self._context(tokens, watched=watched)
        if not change:
            yield context
            return
        with own_file() as path:
            write_gguf_lora(path, 0, change, self._names)
            with context.adapted(path):
                yield context

    def _context(self, tokens: int, *, watched: bool) -> Context:
        """Returns a context for so many tokens: the one at hand if it will do, of which there is one at a time."""
        opened = self._opened
        if opened is not None and opened.capacity >= tokens and opened.watched == watched:
            return opened
        if opened is not None:
            tokens = max(tokens, opened.capacity)
            self._opened = None
            opened.close()
        self._opened = Context(self._model, tokens, watched=watched)
        return self._opened

    def _read(
        self, context: Context, plan: Plan, watching: Watching | None = None, *, every_output: bool = False
    ) -> Iterator[Tensor]:
        """Yields the logits at some of the places, in the order of the plan: a view of llama.cpp's memory."""
        context.forget()
        for part in [*([] if plan.prefix is None else [plan.prefix]), *plan.parts]:
            is_common = part is plan.prefix
            whole = part.with_outputs() if every_output else part
            if watching is not None:
                watching.begin(whole, is_common=is_common)
            for piece in whole.pieces():
                if watching is not None:
                    watching.enter(piece)
                logits = context.logits(piece, watching)
                if piece.read_T.any():
                    yield torch.from_numpy(_at_reads(logits, piece))
            if not is_common:
                context.forget(plan.start)


def _at_reads(logits: Numbers, piece: Part) -> Numbers:
    """Returns the logits of the tokens that are read, of all that are put out."""
    is_read = piece.read_T[np.flatnonzero(piece.output_T)]
    return logits if is_read.all() else logits[is_read]


def _told(asked: Asked, plan: Plan, logits: Iterator[Tensor]) -> Told:
    """Returns what logits at the places tell, in the order in which they were asked for."""
    tokens_PC, parts, done = asked.tokens_PC[plan.places], [], 0
    for values in logits:
        parts.append(told_by(values, tokens_PC[done : done + len(values)], asked.likely))
        done += len(values)
    return joined(parts).at(torch.tensor(plan.places).argsort())


def _continue(
    context: Context,
    part: Part,
    slots: Sequence[int],
    prompts: Sequence[Sequence[int]],
    written: Sequence[list[int]],
    rows: range,
    wanted: Continuing,
) -> None:
    """Writes on behind the prompts of these rows, which are the tokens of a part."""
    context.forget()
    logits = _all_logits(context, part)[list(slots)]
    open_rows = list(rows)
    for place in range(wanted.most):
        for row, token in zip(open_rows, wanted.chosen(logits, open_rows, place), strict=True):
            written[row].append(token)
            if wanted.heard is not None:
                wanted.heard(token)
        open_rows = [row for row in open_rows if not wanted.is_end(row, written[row])]
        if not open_rows or place == wanted.most - 1:
            return
        ones = np.ones(len(open_rows), dtype=np.int32)
        last = Part(
            np.array([written[row][-1] for row in open_rows]),
            np.array([len(prompts[row]) + place for row in open_rows]),
            ones,
            np.array([[row - rows.start] for row in open_rows]),
            ones.astype(bool),
            ones.astype(bool),
            list(rows),
        )
        logits = _all_logits(context, last)


def _all_logits(context: Context, part: Part) -> Tensor:
    return torch.cat([torch.from_numpy(context.logits(piece).copy()) for piece in part.pieces()])


@contextmanager
def own_file() -> Iterator[str]:
    """Yields the path of a new file in memory that no other process sees, where the system has such."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("adapter")
        try:
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)
    else:
        with tempfile.TemporaryDirectory(prefix="tezo-adapter-") as folder:
            yield str(Path(folder) / "adapter.gguf")
