"""Random draws. Each is a pure function of (seed, step, name, role); the global generators are neither read nor set.

Low-rank factors, temporal factors and cores come from `normal`: NumPy's Philox with a 128-bit key, in float64 on the
CPU, then cast. A step log therefore replays on any device and with any number of threads. (torch's CPU generator uses
only 32 bits of its seed, so some draws would repeat in a long run of a large model.)

Dense noise is too large for that: `fill_normal_` draws it on the parameter's device. On a CPU, 16 random bits select
one of 2^16 groups of four numbers from a table, because large draws are dominated by the generator and the lookup. The
groups are a scrambled Sobol' sequence in four dimensions, transformed to the normal distribution and multiplied by the
inverse root of their second moments. Over the table E[z] = 0 and E[z z^T] = I up to rounding, so an estimate E[kappa Z]
is as unbiased as with independent numbers. The moments of degree 4, on which its variance depends, are those of
independent normal numbers up to 0.002.
"""

import hashlib
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from tezo.directions.scratch import scratch


class Key(TypedDict):
    """The key of a draw: seed of the run, step at which the numbers are first used, parameter name and purpose."""

    seed: int
    step: int
    name: str
    role: str


@dataclass(frozen=True)
class DrawKey:
    """Key of a direction: the seed of the run, the step (from 0) and the index among the step's directions."""

    seed: int
    step: int
    index: int = 0

    def of(self, name: str, role: str) -> Key:
        """Returns the key of a draw for the parameter of this name."""
        return {"seed": self.seed, "step": self.step, "name": name, "role": f"{role}.{self.index}"}


Drawn = list[tuple[tuple[int | str, ...], int]]
"""(key, count) of draws of normal numbers, in order; `dict` of it has each key once."""

_drawn: ContextVar[Drawn | None] = ContextVar("drawn", default=None)


@contextmanager
def count_draws() -> Iterator[Drawn]:
    """Lists the draws of `normal` and `fill_normal_` while open."""
    drawn: Drawn = []
    token = _drawn.set(drawn)
    try:
        yield drawn
    finally:
        _drawn.reset(token)


class _OfThread(threading.local):
    """The generators of a thread: making one takes ten times as long as a short draw."""

    def __init__(self) -> None:
        self.words = np.random.SFC64(0)
        philox = np.random.Philox(key=0)
        self.numbers, self.start = np.random.Generator(philox), philox.state
        self.on_devices: dict[torch.device, torch.Generator] = {}


_own = _OfThread()


def _digest(seed: int, step: int, name: str, role: str, size: int) -> int:
    text = f"{seed}\0{step}\0{name}\0{role}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "little")


def normal(shape: tuple[int, ...], *, seed: int, step: int, name: str, role: str) -> Tensor:
    """Returns standard normal numbers, float64, on the CPU; see `Key`."""
    if (drawn := _drawn.get()) is not None:
        drawn.append(((seed, step, name, role), math.prod(shape)))
    return torch.from_numpy(_philox(_digest(seed, step, name, role, 16)).standard_normal(shape))


def permutation(length: int, *, seed: int, step: int, name: str) -> list[int]:
    """Returns a random permutation of `range(length)`."""
    return [int(i) for i in _philox(_digest(seed, step, name, "permutation", 16)).permutation(length)]


def _philox(key: int) -> np.random.Generator:
    """Returns the thread's generator at the start of its stream for a 128-bit key, until the next call."""
    _own.start["state"]["key"] = np.frombuffer(key.to_bytes(16, "little"), "<u8")
    _own.numbers.bit_generator.state = _own.start
    return _own.numbers


class Signs:
    """Random signs s_i of the entries of a vector z with a key, for each example i of a batch; 1 for the first example.

    If z has independent standard normal entries, so has s_i * z, and E[(s_i * z)(s_j * z)^T] = 0 for i != j. Examples
    therefore get separate directions from one draw of z (Flipout, Wen et al. 2018).
    """

    def __init__(self, length: int, key: Key) -> None:
        self._length, self._key = length, key
        self._bits = np.zeros((1, -(-length // 8)), np.uint8)

    def __call__(self, examples: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the signs of B examples: (B, length)."""
        (known, width), most = self._bits.shape, max(examples)
        if known <= most:
            key = self._key
            bits = np.random.SFC64(_digest(key["seed"], key["step"], key["name"], f"{key['role']}.signs", 16))
            words = bits.random_raw(-(-most * width // 8))
            new = words.view(np.uint8)[: most * width].reshape(most, width)
            self._bits = np.concatenate([self._bits[:1], new])
        packed = self._bits[list(examples)]
        if device.type == "cpu":
            negative = torch.from_numpy(np.unpackbits(packed, axis=1, count=self._length))
        else:  # an eighth of the bytes to be moved, and nothing for the CPU to do
            negative = unpacked(torch.from_numpy(packed).to(device), self._length)
        return negative.to(dtype).mul_(-2).add_(1)


def unpacked(bytes_BW: Tensor, length: int) -> Tensor:
    """Returns the first `length` bits of each row of uint8, the highest of a byte first, as 0 and 1: (B, length)."""
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=bytes_BW.device)
    return (bytes_BW.unsqueeze(-1) >> places).bitwise_and_(1).flatten(1)[:, :length]


def seed_of(seed: int, step: int, name: str) -> int:
    """Returns a 32-bit seed for torch's global generator, for the numbers that torch draws, such as dropout masks."""
    return _digest(seed, step, name, "seed", 4)


def generator(device: torch.device, *, seed: int, step: int, name: str, role: str) -> torch.Generator:
    """Returns a torch generator on `device`; its stream depends on the device type."""
    made = torch.Generator(device)
    made.manual_seed(_digest(seed, step, name, role, 8))
    return made


def _reseeded(device: torch.device, seed: int) -> torch.Generator:
    """Returns the thread's generator on a device at the start of its stream for a seed, until the next call."""
    if device not in _own.on_devices:
        _own.on_devices[device] = torch.Generator(device)
    return _own.on_devices[device].manual_seed(seed)


NOISE_VERSION = 2
"""Version of the numbers that `fill_normal_` and stochastic rounding draw on a CPU. A step log records it: with another
version the same records give other weights."""

GROUP = 4
"""Consecutive numbers that one index of 16 bits selects together."""
_SIZE = 1 << 16
_SCRAMBLES = (0x2F5B, 0x9E37, 0xC6EF, 0x51A3)
_LANES = 64
"""Rows of a lookup: torch.gather divides rows among threads, index_select uses one."""
_AT_A_TIME = 1 << 20
"""Numbers looked up at a time; their indices take 2 MB in a scratch buffer."""
_LOOKED_UP_AS = {torch.bfloat16: torch.int64, torch.float32: torch.complex128}
"""A dtype with the size of a group, for each dtype of its numbers."""


def fill_normal_(out: Tensor, *, seed: int, step: int, name: str, role: str) -> Tensor:
    """Fills `out`, of any strides, with standard normal numbers, drawn on its device; they depend on the device type.

    On a CPU four consecutive numbers are one of 2^16 equally likely groups. A number has mean 0, variance 1, fourth
    moment 2.9992 and largest magnitude 4.3. Different groups are independent. The joint moments within a group are
    those of independent normal numbers: exactly up to rounding in degrees 1 and 2, up to 2e-4 in degree 3 and 2e-3 in
    degree 4. In bfloat16 the numbers are those of float32, rounded to nearest.
    """
    if (drawn := _drawn.get()) is not None:
        drawn.append(((seed, step, name, role), out.numel()))
    if out.device.type != "cpu":
        return out.normal_(generator=_reseeded(out.device, _digest(seed, step, name, role, 8)))
    count = -(-out.numel() // (GROUP * _LANES)) * _LANES
    indices = torch.from_numpy(_indices(_digest(seed, step, name, role, 32), count))
    direct = out.is_contiguous() and out.dtype in _LOOKED_UP_AS
    flat = out.view(-1) if direct else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
    whole, table = _LOOKED_UP_AS[flat.dtype], _table(flat.dtype).expand(_LANES, -1)
    for start in range(0, len(flat), _AT_A_TIME):
        part, group = flat[start : start + _AT_A_TIME], indices[start // GROUP : (start + _AT_A_TIME) // GROUP]
        group = group.view(_LANES, -1)
        places = scratch("places", tuple(group.shape), torch.int64, out.device).copy_(group)
        fits = len(part) == GROUP * group.numel() and part.data_ptr() % whole.itemsize == 0
        numbers = part if fits else scratch("groups", (GROUP * group.numel(),), part.dtype, out.device)
        torch.gather(table, 1, places, out=numbers.view(whole).view(places.shape))
        if not fits:
            part.copy_(numbers[: len(part)])
    return out if direct else out.copy_(flat.view(out.shape))


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """Returns the groups in a dtype, each as one number: (2^16,)."""
    return groups().to(dtype).view(_LOOKED_UP_AS[dtype]).squeeze(1)


@cache
def groups() -> Tensor:
    """Returns the 2^16 equally likely groups: (2^16, 4), float32.

    The Sobol' sequence takes each of 2^16 quantiles once in each of the four numbers.
    """
    sobol = torch.quasirandom.SobolEngine(GROUP)  # type: ignore[no-untyped-call]
    points = sobol.draw(_SIZE, dtype=torch.float64).mul_(_SIZE).numpy().astype(np.uint16)
    columns = []
    for column, seed in zip(points.T, _SCRAMBLES, strict=True):
        # a permutation of 0 ... 2^16 - 1 that keeps the uniformity (nested uniform scrambling): on the reversed bits,
        # sums, and products with even numbers, change a bit by lower ones only (Laine and Karras 2011)
        bits = _reversed(column) + np.uint16(seed)
        for factor in (0x6C50, 0xB82E, 0xC7AE, 0x8D22):
            bits ^= bits * np.uint16(factor)
        columns.append(_reversed(bits))
    k = np.stack(columns, axis=1)
    z = torch.from_numpy((2.0 * k + 1) / _SIZE - 1).erfinv_().mul_(2**0.5)
    root = torch.linalg.cholesky(z.T @ z / _SIZE)
    white: Tensor = torch.linalg.solve_triangular(root, z.T, upper=False)
    return white.T.float().contiguous()


def _reversed(k: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(k.astype("<u2").view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")
    return np.packbits(bits, axis=1).view(">u2").astype(np.uint16).ravel()


def _indices(state: int, count: int) -> np.ndarray:
    """Returns `count` indices, a multiple of 4, from an SFC64 generator in this 256-bit state: (count,), uint16."""
    words = np.frombuffer(state.to_bytes(32, "little"), "<u8").astype(np.uint64)
    _own.words.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
    drawn: np.ndarray = _own.words.random_raw(count // 4).view(np.uint16)
    return drawn
