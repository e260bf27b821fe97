"""Whether a model takes packed rows, in which the options of an example share their prompt."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tezo.directions.targets import device_of
from tezo.tasks.objectives.batch import tree_mask
from tezo.tasks.objectives.evaluators import logits_at

LEAST_TOKENS = 8
MOST_OPTION_TOKENS = 16
BOUNDS = ("max_position_embeddings", "sliding_window", "attention_chunk_size", "window_size")
"""Keys of a configuration: in longer rows a model may go by the index in the row, not by position and mask."""


def longest_packed(model: Any) -> int | None:
    """Returns the maximum length in tokens of a packed row, by the model's configuration; None: no limit."""
    bounds = [getattr(model.config, name, None) for name in BOUNDS]
    return min((bound for bound in bounds if isinstance(bound, int) and bound > 0), default=None)


def takes_packed(model: Any, sequence: Sequence[int]) -> bool:
    """Whether packed rows give the same scores as separate rows, with the current weights of a causal model.

    The model must take position ids and a four-dimensional mask, and use both. There is no list of families: the
    signature, the configuration and a numerical test on `sequence`, token ids from the data, decide.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    repeats = -(-LEAST_TOKENS // len(sequence))
    try:
        return _agrees(model, list(sequence) * repeats)
    except (RuntimeError, ValueError, TypeError, IndexError):  # the model rejects the mask
        return False


@torch.no_grad()
def _agrees(model: Any, sequence: list[int]) -> bool:
    """Whether the second of two equal options has the log-probabilities of a separate row.

    The same pass has two wrong rows: in one the options see each other, so the second option can copy the first; in
    the other the positions run backwards. The error of the correct row must be at most a quarter of either error of
    the wrong rows. This needs no rounding bound: a model that ignores the mask or the positions gives two rows equal
    results. The error must also be within a loose rounding bound.
    """
    option = min(MOST_OPTION_TOKENS, len(sequence) // 2)
    start, first = len(sequence) - option, len(sequence) - 1  # the first option ends where the second begins
    asked = torch.arange(start, first)
    row = [*range(first), *asked.tolist()]
    tokens, positions = torch.tensor([[sequence[i] for i in row]]), torch.tensor([row])
    whole = torch.full_like(positions, len(row))
    ends = whole.clone()
    ends[:, start:first] = first
    inputs = {
        "input_ids": tokens.repeat(3, 1),
        "position_ids": torch.cat([positions, positions, len(sequence) - 1 - positions]),
        "attention_mask": tree_mask(torch.cat([ends, whole, ends]), model.dtype),
    }
    second = torch.arange(first, len(row)).repeat(3, 1)
    plain = {"input_ids": torch.tensor([sequence]), "attention_mask": torch.ones((1, len(sequence)), dtype=torch.long)}
    expected = _log_probs(model, plain, asked.unsqueeze(0), sequence[start + 1 :])
    errors = (_log_probs(model, inputs, second, sequence[start + 1 :]) - expected).abs().mean(1)
    true, leaking, backwards = errors.tolist()
    bound = max(1e-3, 32 * torch.finfo(model.dtype).eps)
    return bool(true <= bound and true <= min(leaking, backwards) / 4)


def _log_probs(model: Any, inputs: dict[str, Tensor], reads_RU: Tensor, expected: list[int]) -> Tensor:
    placed = {name: value.to(device_of(model)) for name, value in inputs.items()}
    log_probs = logits_at(model, placed, reads_RU).log_softmax(-1)
    targets_RU1 = torch.tensor(expected, device=log_probs.device).expand(len(reads_RU), -1).unsqueeze(-1)
    return log_probs.gather(-1, targets_RU1).squeeze(-1)
