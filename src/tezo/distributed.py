"""Processes that train one model together: each has the whole model, and they exchange a few numbers a step.

Started by torchrun or `accelerate launch`, which say in the environment how many there are. Every number is a float64,
so that sums are the same on every rank, whichever way they go.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tezo.errors import RunError

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others; one that has died is noticed at once."""


class Ranks:
    """The processes of a run; one alone exchanges nothing.

    Args:
        rank: of this process.
        size: how many there are.

    Attributes:
        bytes_sent: what this process has handed to the others.
        exchanges: how often.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        self.exchanges = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Of each value over the ranks."""
        return [float(x) for x in self._reduced(values, dist.ReduceOp.SUM)]

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        return [float(x) for x in self._reduced(values, dist.ReduceOp.MAX)]

    def first(self, values: Sequence[float]) -> list[float]:
        """What the first rank has."""
        return self.sum(values if self.is_first else [0.0] * len(values))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, of which each has as many."""
        table = torch.zeros(self.size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        return self._reduced(table.view(-1).tolist(), dist.ReduceOp.SUM).view(self.size, -1).tolist()

    def wait(self) -> None:
        """Until all ranks are here."""
        self.sum([0.0])

    def _reduced(self, values: Sequence[float], operation: Any) -> Tensor:
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return tensor
        try:
            dist.all_reduce(tensor, op=operation)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            raise RunError(
                f"rank {self.rank} of {self.size} lost another rank ({reason}); see that one's error, "
                "then go on with --resume."
            ) from None
        self.bytes_sent += tensor.nbytes
        self.exchanges += 1
        return tensor

    def check_equal(self, digest: str, step: int) -> None:
        """An error where a rank's state is not the first's.

        Args:
            digest: SHA-256 of this rank's state, in hexadecimal.
            step: steps taken so far.

        Raises:
            RunError: with the step and the rank.
        """
        if self.size == 1:
            return
        found = self.gather([float(int(digest[i : i + 8], 16)) for i in (0, 8)])
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RunError(
                    f"rank {rank} has other parameters than rank 0 after step {step}; go on with --resume from the "
                    "last checkpoint, and look at that rank's device."
                )

    def close(self) -> None:
        """Lets the others go."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join() -> Ranks:
    """The ranks that the environment speaks of; this process alone where it speaks of none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        # the numbers go from CPU to CPU; shards of a model, where it has any, between GPUs
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size())
