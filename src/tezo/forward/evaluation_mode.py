"""Dropout and its like are off while two evaluations are to see one function."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in `eval()`, and back in `train()` afterwards if it was."""
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        yield
    finally:
        for module in was_training:
            module.training = True
