"""Data-parallel processes: each holds the whole model, and they exchange a few numbers per step.

torchrun or `accelerate launch` starts them, and sets their number and the rank of each in the environment. Numbers are
exchanged as float64, so that sums are equal on every rank.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tezo.system.errors import RequestError, RunError

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others. A process that died is noticed at once."""
_ROLL_CALL = 3.0
"""Seconds in which the ranks that noticed a failure say so; the others are the missing ones."""


class ProcessGroup:
    """The processes of a run. A single process exchanges nothing.

    Args:
        rank: rank of this process, from 0.
        size: number of processes.
        store: where ranks leave word for each other outside exchanges; None: missing ranks are not named.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.bytes_sent = self.exchanges = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over the ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Returns the maximum of each value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def first(self, values: Sequence[float]) -> list[float]:
        """Returns the values of the first rank."""
        return self.sum(values if self.is_first else [0.0] * len(values))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns the values of every rank, in the order of ranks; all ranks pass the same number of values."""
        count = len(values)
        table = [0.0] * (self.size * count)
        table[self.rank * count : (self.rank + 1) * count] = values
        table = self.sum(table)
        return [table[rank * count : (rank + 1) * count] for rank in range(self.size)]

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            try:
                dist.all_reduce(tensor, op=operation)
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:120]
                raise RunError(
                    f"rank {self.rank} of {self.size} lost {self._missing()} ({reason}); see its error, "
                    "then go on with --resume."
                ) from None
            self.bytes_sent += tensor.nbytes
            self.exchanges += 1
        return [float(value) for value in tensor.tolist()]

    def _missing(self) -> str:
        """Names the ranks that do not answer."""
        if self._store is None:
            return "another rank"
        try:
            self._store.set(f"answers/{self.rank}", "")
            time.sleep(_ROLL_CALL)
            return _named([rank for rank in range(self.size) if not self._store.check([f"answers/{rank}"])])
        except RuntimeError:
            return "rank 0"  # whose process has the store

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Has all ranks leave the block at the same time; `doing` names the action in it, after "could not".

        Raises:
            RunError: it failed on another rank, which is named. An error of this rank is raised as it is.
        """
        try:
            yield
        except Exception:
            with suppress(RunError):  # the error of this rank says more
                self.gather([1.0])
            raise
        failed = [rank for rank, (flag,) in enumerate(self.gather([0.0])) if flag]
        if failed:
            raise RunError(f"{_named(failed)} of {self.size} could not {doing}; see its error, then start again.")

    def check_same(self, request: Mapping[str, Any]) -> None:
        """Checks that all ranks were started with the same request: JSON values by name.

        Raises:
            RequestError: on all ranks, if a rank's value differs from that of rank 0; the message has both.
        """
        text = json.dumps(request, sort_keys=True).encode()
        rank = self._differing(hashlib.sha256(text).digest())
        if rank is None:
            return
        (longest,) = self.max([float(len(text))])
        texts = self.gather([float(byte) for byte in text.ljust(int(longest))])
        first, other = (json.loads(bytes(map(int, texts[each]))) for each in (0, rank))
        differing = [key for key in first | other if first.get(key) != other.get(key)]
        key = min(differing, key=lambda key: (key not in first or key not in other, key))  # options follow their method
        raise RequestError(
            f"{key} is {str(other.get(key))[:60]} on rank {rank} and {str(first.get(key))[:60]} on rank 0; "
            "start all ranks with the same settings and data."
        )

    def check_equal(self, digest: str, step: int) -> None:
        """Checks that all ranks have the state of rank 0 after `step` steps, by its SHA-256 in hexadecimal.

        Raises:
            RunError: a rank's state differs; the message has the step and the rank.
        """
        rank = self._differing(bytes.fromhex(digest))
        if rank is not None:
            raise RunError(
                f"rank {rank} has other parameters than rank 0 after step {step}; go on with --resume from the "
                "last checkpoint, and check that rank's device."
            )

    def _differing(self, digest: bytes) -> int | None:
        """Returns the first rank with another digest than rank 0, by its first 8 bytes; None: there is none."""
        digests = self.gather([float(int.from_bytes(digest[i : i + 4])) for i in (0, 4)])
        return next((rank for rank, other in enumerate(digests) if other != digests[0]), None)

    def close(self) -> None:
        """Leaves the process group of torch."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join() -> ProcessGroup:
    """Joins the processes that the environment describes (WORLD_SIZE, RANK, LOCAL_RANK); this one alone if none.

    Raises:
        RunError: a rank did not come within `PATIENCE`; it is named.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ProcessGroup()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return ProcessGroup(dist.get_rank(), dist.get_world_size())
    rank = int(os.environ["RANK"])
    store = _meeting_point(rank, size)
    # the numbers are exchanged between CPUs, the shards of a model (if any) between GPUs
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group_store = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=PATIENCE)
    return ProcessGroup(rank, size, store)


def _meeting_point(rank: int, size: int) -> Any:
    """Returns a store that all ranks have come to."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            *place, size, is_master=rank == 0 and not by_launcher, timeout=PATIENCE, wait_for_workers=False
        )
    except RuntimeError:
        raise RunError(f"rank {rank} of {size} did not reach rank 0 at {place[0]}:{place[1]}; see its error.") from None
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"tezo/{start}", store)  # type: ignore[attr-defined]
    store.set(f"came/{rank}", "")
    try:
        store.wait([f"came/{other}" for other in range(size)], PATIENCE)
    except RuntimeError:
        missing = [other for other in range(size) if not _came(store, other)]
        raise RunError(
            f"{_named(missing)} of {size} did not start within {PATIENCE.total_seconds():.0f} s; see its error."
        ) from None
    return store


def _came(store: Any, rank: int) -> bool:
    try:
        return bool(store.check([f"came/{rank}"]))
    except RuntimeError:  # rank 0 has gone, and the store with it
        return rank != 0


def _named(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))
