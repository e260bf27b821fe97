"""The rank that an adapter has in its file: the next that vLLM takes."""

import torch
from torch import Tensor

ALLOWED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for `max_lora_rank`; it keeps memory for that rank whatever the adapter's is."""

Pair = tuple[Tensor, Tensor]
"""(A_RI, B_OR) of a layer."""


def next_allowed(rank: int) -> int:
    """The smallest allowed rank that is not below `rank`; `rank` itself above the largest."""
    return next((allowed for allowed in ALLOWED_RANKS if allowed >= rank), rank)


def padded(pair: Pair, rank: int) -> Pair:
    """The pair with rows of A and columns of B that are zero, up to `rank`; B A stays what it is."""
    a_RI, b_OR = pair
    more = rank - a_RI.shape[0]
    if more == 0:
        return pair
    return torch.cat([a_RI, a_RI.new_zeros(more, a_RI.shape[1])]), torch.cat([b_OR, b_OR.new_zeros(len(b_OR), more)], 1)
