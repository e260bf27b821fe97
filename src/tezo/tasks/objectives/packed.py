"""Whether a model gives the options of an example the scores they have alone when they share one row.

It must take positions and a mask of four dimensions and heed both. No list of families says so: the signature, the
configuration and, decisively, the numbers do.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import device_of
from tezo.tasks.objectives.logits import logits_at
from tezo.tasks.objectives.token_rows import packed_row, padded, tree_mask

LEAST_TOKENS = 8
MOST_OPTION_TOKENS = 16
BOUNDS = ("max_position_embeddings", "sliding_window", "attention_chunk_size", "window_size")
"""Of a configuration: longer rows may be treated by their place in the row instead of by position and mask."""


def longest_packed(model: Any) -> int | None:
    """The longest packed row in tokens that this model's configuration allows; None where nothing bounds it."""
    bounds = [getattr(model.config, name, None) for name in BOUNDS]
    return min((bound for bound in bounds if isinstance(bound, int) and bound > 0), default=None)


def takes_packed(model: Any, sequence: Sequence[int]) -> bool:
    """Whether packed rows give this model's plain scores, as it is now.

    Args:
        model: a causal language model of transformers.
        sequence: tokens to try it with, such as the model is going to see.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    repeats = -(-LEAST_TOKENS // len(sequence))
    try:
        return _agrees(model, list(sequence) * repeats)
    except (RuntimeError, ValueError, TypeError, IndexError):  # a mask of this shape or type is not for this model
        return False


@torch.no_grad()
def _agrees(model: Any, sequence: list[int]) -> bool:
    """Whether the second of two equal options has its plain log-probabilities.

    In the same pass go a row whose options see each other, which shows where a copy went before, and one whose
    positions run backwards. The true row must be four times nearer to the plain one than either, for which no
    rounding has to be known: a model that drops the mask, or the positions, gives two rows the same. And it must be
    within a loose bound of rounding.
    """
    option = min(MOST_OPTION_TOKENS, len(sequence) // 2)
    start = len(sequence) - option
    asked = list(range(start, len(sequence) - 1))
    row = packed_row([sequence, sequence], [asked, asked], shared=start)
    tokens, positions, branches = (torch.tensor([part]) for part in (row.tokens, row.positions, row.branches))
    inputs = {
        "input_ids": tokens.repeat(3, 1),
        "position_ids": torch.cat([positions, positions, len(sequence) - 1 - positions]),
        "attention_mask": tree_mask(torch.cat([branches, torch.zeros_like(branches), branches]), model.dtype),
    }
    second = padded([[row.reads[i] for i in row.slots[1]]] * 3, 0)
    plain = {"input_ids": torch.tensor([sequence]), "attention_mask": torch.ones((1, len(sequence)), dtype=torch.long)}
    expected = _log_probs(model, plain, torch.tensor([asked]), sequence[start + 1 :])
    errors = (_log_probs(model, inputs, second, sequence[start + 1 :]) - expected).abs().mean(1)
    true, leaking, backwards = errors.tolist()
    bound = max(1e-3, 32 * torch.finfo(model.dtype).eps)
    return bool(true <= bound and true <= min(leaking, backwards) / 4)


def _log_probs(model: Any, inputs: dict[str, Tensor], reads_RU: Tensor, expected: list[int]) -> Tensor:
    """(R, U) log-probabilities of the `expected` tokens."""
    device = device_of(model)
    placed = {name: value.to(device) for name, value in inputs.items()}
    log_probs = logits_at(model, placed, reads_RU.to(device)).log_softmax(-1)
    targets_RU1 = torch.tensor(expected, device=log_probs.device).expand(len(reads_RU), -1).unsqueeze(-1)
    return log_probs.gather(-1, targets_RU1).squeeze(-1)
