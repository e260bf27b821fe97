"""Data-parallel processes: each holds the whole model, and they exchange a few numbers per step.

torchrun or `accelerate launch` starts them and sets the number of processes in the environment. All numbers are
exchanged as float64, so that sums are equal on every rank.
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
"""How long a rank waits for the others. A process that died is noticed at once."""


class Ranks:
    """The processes of a run. A single process exchanges nothing.

    Args:
        rank: rank of this process, from 0.
        size: number of processes.

    Attributes:
        bytes_sent: bytes that this process has sent to the others.
        exchanges: number of exchanges.
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
        """The sum of each value over the ranks."""
        return [float(x) for x in self._reduced(values, dist.ReduceOp.SUM)]

    def max(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over the ranks."""
        return [float(x) for x in self._reduced(values, dist.ReduceOp.MAX)]

    def first(self, values: Sequence[float]) -> list[float]:
        """The values of the first rank."""
        return self.sum(values if self.is_first else [0.0] * len(values))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in the order of ranks; all ranks pass the same number of values."""
        table = torch.zeros(self.size, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        return self._reduced(table.view(-1).tolist(), dist.ReduceOp.SUM).view(self.size, -1).tolist()

    def wait(self) -> None:
        """Waits until all ranks have called it."""
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
                f"rank {self.rank} of {self.size} lost another rank ({reason}); see the error of that rank, "
                "then go on with --resume."
            ) from None
        self.bytes_sent += tensor.nbytes
        self.exchanges += 1
        return tensor

    def check_equal(self, digest: str, step: int) -> None:
        """Checks that all ranks have the state of the first rank.

        Args:
            digest: SHA-256 of this rank's state, in hexadecimal.
            step: number of steps taken so far.

        Raises:
            RunError: a rank's state differs; the message has the step and the rank.
        """
        if self.size == 1:
            return
        digests = self.gather([float(int(digest[i : i + 8], 16)) for i in (0, 8)])
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise RunError(
                    f"rank {rank} has other parameters than rank 0 after step {step}; go on with --resume from the "
                    "last checkpoint, and check that rank's device."
                )

    def close(self) -> None:
        """Leaves the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join() -> Ranks:
    """The ranks that the environment describes (WORLD_SIZE, LOCAL_RANK); this process alone if there are none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        # the numbers are exchanged between CPUs, the shards of a model (if any) between GPUs
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size())
