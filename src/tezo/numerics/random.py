"""Random draws. Each is a pure function of (seed, step, name, role); the global generators are neither read nor set.

Low-rank factors, temporal factors and cores come from `normal`: NumPy's Philox with a 128-bit key, in float64 on the
CPU, then cast. A step log therefore replays on any device and with any number of threads. (torch's CPU generator uses
only 32 bits of its seed, so some draws would repeat in a long run of a large model.) Dense noise is too large to be
drawn on the CPU: `fill_normal_` draws it on the parameter's device.
"""

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tezo.numerics.noise_table import fill_from_table_

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
    _count((seed, step, name, role), math.prod(shape))
    return torch.from_numpy(_philox(_digest(seed, step, name, role, 16)).standard_normal(shape))


def permutation(length: int, *, seed: int, step: int, name: str) -> list[int]:
    """A random permutation of `range(length)`."""
    return [int(i) for i in _philox(_digest(seed, step, name, "permutation", 16)).permutation(length)]


_own = threading.local()


def _philox(key: int) -> np.random.Generator:
    """Philox at the start of its stream for a 128-bit key; the thread's next call gives the same object another key.

    Making another object takes ten times as long as a short draw.
    """
    if not hasattr(_own, "generator"):
        bits = np.random.Philox(key=0)
        _own.generator, _own.start = np.random.Generator(bits), bits.state
    _own.start["state"]["key"] = np.frombuffer(key.to_bytes(16, "little"), "<u8")
    _own.generator.bit_generator.state = _own.start
    generator: np.random.Generator = _own.generator
    return generator


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


def fill_normal_(out: Tensor, *, seed: int, step: int, name: str, role: str) -> Tensor:
    """Fills `out` with standard normal numbers, drawn on its device; the numbers depend on the device type.

    On a CPU four consecutive numbers are one of 2^16 equally likely groups, see `tezo.numerics.noise_table`. A number
    has mean 0, variance 1, fourth moment 2.9992 and largest magnitude 4.3. Different groups are independent. The joint
    moments within a group are those of independent normal numbers: exactly up to rounding in degrees 1 and 2, up to
    2e-4 in degree 3 and 2e-3 in degree 4.
    """
    _count((seed, step, name, role), out.numel())
    if out.device.type != "cpu":
        return out.normal_(generator=generator(out.device, seed=seed, step=step, name=name, role=role))
    return fill_from_table_(out, _digest(seed, step, name, role, 32))


def seed_of(seed: int, step: int, name: str) -> int:
    """A 32-bit seed for torch's global generator, for what torch itself draws, such as dropout masks."""
    return _digest(seed, step, name, "seed", 4)


def generator(device: torch.device, *, seed: int, step: int, name: str, role: str) -> torch.Generator:
    """A torch generator on `device`; its stream depends on the device type."""
    made = torch.Generator(device)
    made.manual_seed(_digest(seed, step, name, role, 8))
    return made
