"""Random draws. Each is a pure function of (seed, step, name, role); the global generators are neither read nor set.

Low-rank factors, temporal factors and cores come from `normal`: NumPy's Philox with a 128-bit key, in float64 on the
CPU, then cast. A step log therefore replays on any device and with any number of threads. (torch's CPU generator uses
only 32 bits of its seed, so some draws would repeat in a long run of a large model.) Dense noise is too large to be
drawn on the CPU: `fill_normal_` draws it on the parameter's device.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tezo.numerics.scratch import scratch

Key = tuple[int, int, str, str]


@dataclass
class Drawn:
    """Number of normal numbers drawn for each (seed, step, name, role).

    Attributes:
        sizes: key -> numbers drawn with it; a draw that is repeated counts once.
        with_repeats: key -> the same, where every draw counts.
    """

    sizes: dict[Key, int] = field(default_factory=dict)
    with_repeats: Counter[Key] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Number of normal numbers in total; a draw that is repeated counts once."""
        return sum(self.sizes.values())


_counter: ContextVar[Drawn | None] = ContextVar("drawn", default=None)


@contextmanager
def count_draws() -> Iterator[Drawn]:
    """Context that counts the numbers drawn by `normal` and `fill_normal_`."""
    token = _counter.set(Drawn())
    try:
        yield _counter.get()  # type: ignore[misc]
    finally:
        _counter.reset(token)


def _count(key: Key, size: int) -> None:
    counter = _counter.get()
    if counter is not None:
        counter.sizes[key] = max(size, counter.sizes.get(key, 0))
        counter.with_repeats[key] += size


def _digest(seed: int, step: int, name: str, role: str, size: int) -> int:
    text = f"{seed}\0{step}\0{name}\0{role}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "little")


def normal(shape: tuple[int, ...], *, seed: int, step: int, name: str, role: str) -> Tensor:
    """Standard normal numbers, float64, on the CPU.

    Args:
        shape: shape of the result.
        seed: seed of the run.
        step: step at which the numbers are first used.
        name: name of the parameter that they are drawn for.
        role: purpose of the numbers, such as "tau" or "u".
    """
    bits = np.random.Philox(key=_digest(seed, step, name, role, 16))
    _count((seed, step, name, role), int(np.prod(shape)))
    return torch.from_numpy(np.random.Generator(bits).standard_normal(shape))


def permutation(length: int, *, seed: int, step: int, name: str) -> list[int]:
    """A random permutation of `range(length)`."""
    bits = np.random.Philox(key=_digest(seed, step, name, "permutation", 16))
    return [int(i) for i in np.random.Generator(bits).permutation(length)]


@dataclass
class Signs:
    """Random signs s_i of the entries of a vector, for each example i of a batch; all are 1 for the first example.

    If z has independent standard normal entries, so has s_i * z, and E[(s_i * z)(s_j * z)^T] = 0 for i != j. Examples
    therefore get directions of their own from one draw of z (Flipout, Wen et al. 2018).

    Args:
        length: number of entries.
        seed: seed of the run.
        step: step of the draw.
        name: name of the parameter.
        role: purpose of the signs.
    """

    length: int
    seed: int
    step: int
    name: str
    role: str
    _bits: np.ndarray = field(default_factory=lambda: np.zeros((1, 0), np.uint8))

    def __call__(self, examples: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """(B, length) for B examples."""
        count, width = 1 + max(examples), -(-self.length // 8)
        if len(self._bits) < count:
            bits = np.random.SFC64(_digest(self.seed, self.step, self.name, self.role, 16))
            words = bits.random_raw(-(-(count - 1) * width // 8)).view(np.uint8)[: (count - 1) * width]
            self._bits = np.concatenate([np.zeros((1, width), np.uint8), words.reshape(count - 1, width)])
        negative = np.unpackbits(self._bits[list(examples)], axis=1, count=self.length)
        return torch.from_numpy(negative).to(device, dtype).mul_(-2).add_(1)


GENERATOR = 2
"""Version of the numbers that `fill_normal_` and stochastic rounding draw on a CPU. A step log records it: with another
version the same records give other weights."""

GROUP = 4
"""Consecutive numbers of dense noise that one index of 16 bits selects together."""
_ROWS = 64
"""Rows of a lookup: torch.gather divides rows among threads, index_select uses one."""
_AT_A_TIME = 1 << 20
"""Numbers looked up at a time: a tile of a dense direction. The two buffers for them have 2 MB each."""
_words = threading.local()


@cache
def _groups() -> Tensor:
    """The 2^16 groups of four numbers, as the bits of four bfloat16 each: (2^16,), int64.

    They are a Sobol' sequence in four dimensions, scrambled and transformed to the normal distribution. Each of the
    four numbers takes each of the 2^16 equally likely quantiles once, rounded to bfloat16.
    """
    sobol = torch.quasirandom.SobolEngine(GROUP)  # type: ignore[no-untyped-call]
    points = sobol.draw(1 << 16, dtype=torch.float64).mul_(2.0**16).numpy()
    k = np.stack([_scrambled(points[:, i].astype(np.uint16), seed) for i, seed in enumerate(_SCRAMBLES)], axis=1)
    quantiles = torch.from_numpy((2.0 * k + 1) * 2.0**-16 - 1).erfinv_().mul_(2**0.5)
    return quantiles.to(torch.bfloat16).view(torch.int64).squeeze(1)


_SCRAMBLES = (0x2F5B, 0x9E37, 0xC6EF, 0x51A3)


def _scrambled(k: np.ndarray, seed: int) -> np.ndarray:
    """A permutation of 0 ... 2^16 - 1 that keeps the uniformity of a Sobol' sequence (nested uniform scrambling).

    On the reversed bits, sums, and products with even numbers, change a bit by lower ones only (Laine and Karras 2011).
    """
    bits = _reversed(k) + np.uint16(seed)
    for factor in (0x6C50, 0xB82E, 0xC7AE, 0x8D22):
        bits ^= bits * np.uint16(factor)
    return _reversed(bits)


def _reversed(k: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(k.astype("<u2").view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")
    return np.packbits(bits, axis=1).view(">u2").astype(np.uint16).ravel()


def fill_normal_(out: Tensor, *, seed: int, step: int, name: str, role: str) -> Tensor:
    """Fills `out` with standard normal numbers, drawn on its device; the numbers depend on the device type.

    On a CPU four consecutive numbers are one of 2^16 equally likely groups, selected by 16 random bits. All are
    bfloat16 numbers, so they are the same in every dtype. A number has mean 0, variance 0.99999, fourth moment 2.9991
    and largest magnitude 4.3. Different groups are independent. The joint moments within a group are those of
    independent normal numbers up to 4e-5 in degree 2, 2e-4 in degree 3 and 2e-3 in degree 4.
    """
    _count((seed, step, name, role), out.numel())
    if out.device.type != "cpu":
        return out.normal_(generator=generator(out.device, seed=seed, step=step, name=name, role=role))
    count = -(-out.numel() // (GROUP * _ROWS)) * _ROWS
    indices = torch.from_numpy(_random_indices(_digest(seed, step, name, role, 32), count))
    flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype)
    for start in range(0, len(flat), _AT_A_TIME):
        stop = start + _AT_A_TIME
        _look_up(indices[start // GROUP : stop // GROUP], flat[start:stop])
    return out if out.is_contiguous() else out.copy_(flat.view(out.shape))


def _random_indices(state: int, count: int) -> np.ndarray:
    """`count` indices, a multiple of 4, from an SFC64 generator in this state of 256 bits: (count,), uint16."""
    if not hasattr(_words, "generator"):
        _words.generator = np.random.SFC64(0)  # seeding one takes longer than drawing a small tile
    bits: np.random.SFC64 = _words.generator
    words = np.frombuffer(state.to_bytes(32, "little"), "<u8").astype(np.uint64)
    bits.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
    drawn: np.ndarray = bits.random_raw(count // 4).view(np.uint16)
    return drawn


def _look_up(indices: Tensor, out: Tensor) -> None:
    """Out <- the groups with these indices, one after another; the last ones may not fit."""
    shape = (_ROWS, len(indices) // _ROWS)
    places = scratch("places", shape, torch.int64, indices.device).copy_(indices.view(shape))
    direct = out.dtype == torch.bfloat16 and len(out) == GROUP * len(indices) and out.data_ptr() % 8 == 0
    groups = out.view(torch.int64).view(shape) if direct else scratch("groups", shape, torch.int64, indices.device)
    torch.gather(_groups().expand(_ROWS, -1), 1, places, out=groups)
    if not direct:
        out.copy_(groups.view(torch.bfloat16).view(-1)[: len(out)])


def seed_of(seed: int, step: int, name: str) -> int:
    """A 32-bit seed for torch's global generator, for what torch itself draws, such as dropout masks."""
    return _digest(seed, step, name, "seed", 4)


def generator(device: torch.device, *, seed: int, step: int, name: str, role: str) -> torch.Generator:
    """A torch generator on `device`; its stream depends on the device type."""
    made = torch.Generator(device)
    made.manual_seed(_digest(seed, step, name, role, 8))
    return made
