"""Several models in one forward pass: the rows of a batch in equal blocks, and block g meets model g."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class NotInBlocksError(Exception):
    """A module met a tensor whose leading dimension is not the pass's rows: its blocks cannot be told apart."""


class Blocks:
    """What a forward pass of `model` has as rows, for cutting the inputs of its modules into blocks.

    Attributes:
        rows: the leading dimension of the first tensor that the model was called with; None outside a pass.
        tokens: that, times its second dimension.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows: int | None = None
        self.tokens: int | None = None
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del model
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
        self.rows = tensors[0].shape[0] if tensors else None
        self.tokens = tensors[0].shape[:2].numel() if tensors else None

    def _leave(self, *_: object) -> None:
        self.rows = self.tokens = None

    def split(self, values: Tensor, count: int, keep: int) -> Tensor:
        """(count, T, *the last `keep` dimensions): `values` as so many equal, contiguous blocks of rows.

        Raises:
            NotInBlocksError: the leading dimension is neither the pass's rows nor its tokens, so that what is in it
                are other things, as the tokens of one expert are; or what is looked up differs from block to block.
        """
        leading = values.shape[0] if values.ndim > keep else 1
        known = self.rows is None or leading in (self.rows, self.tokens)
        if count > 1 and (leading % count or not known):
            raise NotInBlocksError
        blocks = values.reshape(count, -1, *values.shape[values.ndim - keep :])
        square = values.ndim == 1 or values.shape[0] == values.shape[1]
        if count > 1 and keep == 0 and square and not (blocks == blocks[:1]).all():  # distances, and not the rows' ids
            raise NotInBlocksError
        return blocks

    def close(self) -> None:
        """Removes its hooks from the model."""
        for handle in self._handles:
            handle.remove()
