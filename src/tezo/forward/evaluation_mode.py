"""Evaluation mode during a step: without dropout, so that all evaluations use the same function."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context in which all modules are in evaluation mode; their previous modes are restored afterwards."""
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        yield
    finally:
        for module in was_training:
            module.training = True
