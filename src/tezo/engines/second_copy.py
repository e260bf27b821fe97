"""Whether a server computes with the weights in a folder, and with all of an adapter: by what it answers of one text.

That it leaves out layers or ranks of an adapter is told by its answers alone. That its weights are those of the folder
takes a second copy: torch computes the same text from the folder, layer by layer, as looks at inputs do.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tezo.forward.engine import Change
from tezo.system.progress import CHECKING, current

TEXT = (
    "On Monday the ferry leaves the old harbour at 7:45, and it takes about two hours. Bring warm clothes, water and "
    "something to eat; the naïve tourist forgets all three."
)
"""A text of which the tokens are likely and unlikely."""
OTHER, DOUBTFUL = 0.3, 0.1
"""Mean difference of log-probabilities, in nats, of other weights, and one that rounding may make in few bits.

Four-bit files differ by 0.2 on average (docs/llama-cpp.md), bfloat16 by 0.04 (one trial, SmolLM2-135M)."""
PART = 0.25
"""Likewise under an adapter, as a part of what the adapter changes."""
NOISES = 3.0
"""Change of log-probabilities, as a multiple of that by asking again, up to which there is none."""
SMALL = 0.3
"""Size of the outputs of an adapter whose effect is compared, of inputs of about 1."""


def by_kind(modules: Sequence[str]) -> dict[str, list[str]]:
    """Returns the last part of the names of modules, such as q_proj -> the modules."""
    found: dict[str, list[str]] = {}
    for name in modules:
        found.setdefault(name.rpartition(".")[2], []).append(name)
    return found


def random_change(model: nn.Module, modules: Sequence[str], size: float, rank: int = 1) -> Change:
    """Returns a change of these linear layers by random outputs of about `size`, of its last rank alone."""
    draw, found = torch.Generator().manual_seed(0), {}
    for name in modules:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        a_RI, b_OR = torch.zeros(rank, layer.in_features), torch.zeros(layer.out_features, rank)
        a_RI[-1] = torch.randn(layer.in_features, generator=draw) / layer.in_features**0.5
        b_OR[:, -1] = size * torch.randn(layer.out_features, generator=draw)
        found[name] = a_RI, b_OR
    return found


@dataclass(frozen=True)
class Compared:
    """A verdict on a server.

    Attributes:
        wrong: what it does otherwise, as the end of a sentence; None: nothing.
        doubt: what the user should know; None: nothing.
    """

    wrong: str | None
    doubt: str | None


class SecondCopy:
    """Log-probabilities of a text that torch computes with the weights of a folder.

    Args:
        model: whose weights are read for the forward of each layer.
        why_not: why they cannot be read, as a clause; None: they can.

    Attributes:
        why_not: likewise.
    """

    def __init__(self, model: Any, why_not: str | None = None) -> None:
        self._model, self.why_not = model, why_not
        self._known: dict[tuple[tuple[int, ...], tuple[str, ...]], tuple[Change, Tensor]] = {}

    def log_probs(self, tokens: Sequence[int], modules: Sequence[str]) -> tuple[Change, Tensor]:
        """Returns (a random change of modules, the log-probabilities of the next tokens of a text without and with it).

        They are (2, tokens - 1), float32.
        """
        key = tuple(tokens), tuple(modules)
        if key not in self._known:
            change = random_change(self._model, modules, SMALL)
            with current().phase(CHECKING), torch.no_grad(), ExitStack() as hooks:
                for name, (a_RI, b_OR) in change.items():
                    hook = _adding(a_RI, b_OR)
                    hooks.callback(self._model.get_submodule(name).register_forward_hook(hook).remove)
                ids = torch.tensor([[*tokens], [*tokens]])
                logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                self._known[key] = change, logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
        return self._known[key]


def _adding(a_RI: Tensor, b_OR: Tensor) -> Any:
    def add(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        del module
        added = args[0][1:].float() @ a_RI.T @ b_OR.T
        return torch.cat([output[:1], output[1:] + added.to(output.dtype)])

    return add


def compared(told: Tensor, expected: Tensor) -> Compared:
    """Compares log-probabilities of a server with those of a second copy, (2, tokens): without and with a change."""
    off, off_changed = ((told - expected).abs().mean(1)).tolist()
    effect = float((expected[1] - expected[0]).abs().mean())
    if off > OTHER:
        return Compared(
            f"has other weights than the folder: log-probabilities of a text differ by {off:.2f} nats on average. Give "
            "the folder that it serves as model.name",
            None,
        )
    if off_changed > off + max(DOUBTFUL, PART * effect):
        return Compared(
            f"computes an adapter otherwise: under one that changes log-probabilities by {effect:.2f} nats they are "
            f"{off_changed:.2f} off on average. Give the address of a server that computes adapters as PEFT does",
            None,
        )
    doubt = None
    if off > DOUBTFUL:
        doubt = (
            f"log-probabilities of a text differ by {off:.2f} nats on average from those of the folder; the server has "
            "other weights, or has rounded them to few bits."
        )
    return Compared(None, doubt)


def left_out(plain: Tensor, again: Tensor, under: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the changes that change the log-probabilities of a text no more than asking again does.

    Args:
        plain: without a change.
        again: likewise, of another request, which a server may have rounded otherwise in another batch.
        under: name -> under a change, of outputs of about 1.
    """
    noise = float((again - plain).abs().mean())
    return [name for name, told in under.items() if float((told - plain).abs().mean()) <= NOISES * noise]
