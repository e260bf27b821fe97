"""Several copies of a model in one forward pass: every module must see the rows of all copies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """While open, embeddings that the model looks up once for all rows, such as positions, are looked up per row.

    Hooks that assign rows to copies need this. `model` must be called with `input_ids` as a keyword.
    """
    rows = 1

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module, args
        nonlocal rows
        rows = len(kwargs["input_ids"])

    def widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        del module
        if args and isinstance(args[0], Tensor) and args[0].ndim == 2 and len(args[0]) == 1:
            return (args[0].expand(rows, -1), *args[1:])
        return None

    handles = [model.register_forward_pre_hook(note, with_kwargs=True)]
    handles += [m.register_forward_pre_hook(widen) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
