"""Draws. Each is a pure function of (seed, step, name, role); the global generators are neither read nor set.

Low-rank factors, temporal factors and cores come from `normal`: NumPy's Philox with a 128-bit key, in
float64 on the CPU, then cast, so that a step log replays on any device and with any number of threads.
(torch's CPU generator keeps 32 bits of its seed: over a long run of a large model some draws would repeat.)
Dense noise is too large for that: `fill_normal_` draws it on the parameter's own device.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tezo.numerics.scratch import row_slices, scratch

Key = tuple[int, int, str, str]


@dataclass
class Drawn:
    """How many normal numbers were drawn, for each (seed, step, name, role); a redraw of the same is not counted."""

    sizes: dict[Key, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.sizes.values())


_counter: ContextVar[Drawn | None] = ContextVar("drawn", default=None)


@contextmanager
def count_draws() -> Iterator[Drawn]:
    """Counts what `normal` and `fill_normal_` draw while it is open."""
    token = _counter.set(Drawn())
    try:
        yield _counter.get()  # type: ignore[misc]
    finally:
        _counter.reset(token)


def _count(key: Key, size: int) -> None:
    counter = _counter.get()
    if counter is not None:
        counter.sizes[key] = size


def _digest(seed: int, step: int, name: str, role: str, size: int) -> int:
    text = f"{seed}\0{step}\0{name}\0{role}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "little")


def normal(shape: tuple[int, ...], *, seed: int, step: int, name: str, role: str) -> Tensor:
    """Standard normal numbers: float64, on the CPU.

    Args:
        shape: of the result.
        seed: of the run.
        step: at which the numbers are first used.
        name: of the parameter they belong to.
        role: what they are for, such as "tau" or "u".
    """
    bits = np.random.Philox(key=_digest(seed, step, name, role, 16))
    _count((seed, step, name, role), int(np.prod(shape)))
    return torch.from_numpy(np.random.Generator(bits).standard_normal(shape))


def permutation(length: int, *, seed: int, step: int, name: str) -> list[int]:
    """A random order of `range(length)`."""
    bits = np.random.Philox(key=_digest(seed, step, name, "permutation", 16))
    return [int(i) for i in np.random.Generator(bits).permutation(length)]


_AT_A_TIME = 1 << 18
"""Numbers that are looked up at a time: each takes an index of 8 bytes, in memory that is kept."""


@cache
def _quantiles(dtype: torch.dtype) -> Tensor:
    """(2^16,): z_k at the place that the 16 bits of k name, read without a sign."""
    k = torch.arange(2**16, device="cpu").to(torch.int16).to(dtype)
    return k.mul_(2.0**-15).add_(2.0**-16).erfinv_().mul_(2**0.5)


def fill_normal_(out: Tensor, *, seed: int, step: int, name: str, role: str) -> Tensor:
    """Fills `out` with standard normal numbers for dense noise, drawn on its device, on whose type they depend.

    On a CPU a number is one of the 2^16 equally likely quantiles

        z_k = sqrt(2) erf^-1((2k + 1) / 2^16),   k = -2^15 ... 2^15 - 1,

    of mean 0, variance 0.99998, fourth moment 2.9991 and size up to 4.3: 16 random bits a number, looked up in a table
    of them all.
    """
    _count((seed, step, name, role), out.numel())
    if out.device.type != "cpu":
        return out.normal_(generator=generator(out.device, seed=seed, step=step, name=name, role=role))
    bits = np.random.SFC64(_digest(seed, step, name, role, 16)).random_raw(-(-out.numel() // 4))
    k = torch.from_numpy(bits.view(np.uint16)[: out.numel()])
    shape = (1, len(out)) if out.ndim == 1 else (len(out), math.prod(out.shape[1:]))
    k_MN, out_MN, table = k.view(shape), out.view(shape), _quantiles(out.dtype)
    for rows in row_slices(shape, _AT_A_TIME):
        places = scratch("places", tuple(k_MN[rows].shape), torch.int64, out.device).copy_(k_MN[rows])
        # torch.gather shares rows out among threads; index_select of one dimension does not
        torch.gather(table.expand(len(places), -1), 1, places, out=out_MN[rows])
    return out


def seed_of(seed: int, step: int, name: str) -> int:
    """A seed for torch's global generator, of the 32 bits its CPU form keeps: for what torch draws, such as dropout."""
    return _digest(seed, step, name, "seed", 4)


def generator(device: torch.device, *, seed: int, step: int, name: str, role: str) -> torch.Generator:
    """A torch generator on `device`; its stream depends on the device's type."""
    made = torch.Generator(device)
    made.manual_seed(_digest(seed, step, name, role, 8))
    return made
