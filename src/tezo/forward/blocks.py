"""Several perturbed models in one forward pass: the rows of a batch form equal blocks, and block g uses model g."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tezo.forward.interception import untraced
from tezo.forward.uncopied import Uncopied


class NotInBlocksError(Exception):
    """A tensor inside the model cannot be split into blocks, because its leading dimension is not the pass's rows."""


class Blocks(Uncopied):
    """Records the number of rows of a forward pass of `model`, and splits inputs of its modules into blocks.

    Attributes:
        rows: leading dimension of the first tensor argument of the model; None outside a pass.
        tokens: `rows` times the second dimension of that tensor; None outside a pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows: int | None = None
        self.tokens: int | None = None
        self._begin: Callable[[int], object] | None = None
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del model
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
        self.rows = tensors[0].shape[0] if tensors else None
        self.tokens = tensors[0].shape[:2].numel() if tensors else None
        if self._begin is not None and self.rows is not None:
            self._begin(self.rows)

    @contextmanager
    def before_each_pass(self, begin: Callable[[int], object]) -> Iterator[None]:
        """Context in which `begin` is called before each forward pass, with its number of rows."""
        self._begin = untraced(begin)
        try:
            yield
        finally:
            self._begin = None

    def _leave(self, *_: object) -> None:
        self.rows = self.tokens = None

    def split(self, values: Tensor, count: int, keep: int) -> Tensor:
        """`values` as `count` equal, contiguous blocks of rows: (count, T, *the last `keep` dimensions).

        Raises:
            NotInBlocksError: the leading dimension is neither the pass's rows nor its tokens (for example the tokens
                routed to one expert), or lookup ids (`keep` = 0) of shape (L,) or (L, L), which may be positions or
                position differences instead of token ids, differ between blocks.
        """
        leading = values.shape[0] if values.ndim > keep else 1
        known = self.rows is None or leading in (self.rows, self.tokens)
        if count > 1 and (leading % count or not known):
            raise NotInBlocksError
        blocks = values.reshape(count, -1, *values.shape[values.ndim - keep :])
        square = values.ndim == 1 or values.shape[0] == values.shape[1]
        if count > 1 and keep == 0 and square and not (blocks == blocks[:1]).all():  # may be positions
            raise NotInBlocksError
        return blocks

    def close(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()
