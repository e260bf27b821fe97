"""Normal numbers on a CPU, four at a time: 16 random bits select one of 2^16 groups of four numbers from a table.

Large draws are dominated by the generator, and then by the lookup: groups of four need a quarter of both. The groups
are a Sobol' sequence in four dimensions, scrambled, transformed to the normal distribution, and multiplied by the
inverse root of their second moments. Over the table, therefore, E[z] = 0 and E[z z^T] = I up to rounding. An estimate
E[kappa Z] is as unbiased as with independent numbers, and the moments of degree 4, on which its variance depends, are
those of independent normal numbers up to 0.002.
"""

import threading
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tezo.numerics.scratch import scratch

NOISE_VERSION = 2
"""Version of the numbers that `fill_from_table_` and stochastic rounding draw on a CPU. A step log records it: with
another version the same records give other weights."""

GROUP = 4
"""Consecutive numbers that one index of 16 bits selects together."""
_SIZE = 1 << 16
_SCRAMBLES = (0x2F5B, 0x9E37, 0xC6EF, 0x51A3)
_LANES = 64
"""Rows of a lookup: torch.gather divides rows among threads, index_select uses one."""
_AT_A_TIME = 1 << 20
"""Numbers looked up at a time; their indices take 2 MB in a scratch buffer."""


class _OfThread(threading.local):
    """The generator of a thread: making one takes longer than drawing a small tile."""

    def __init__(self) -> None:
        self.bits = np.random.SFC64(0)


_own = _OfThread()


def fill_from_table_(out: Tensor, state: int) -> Tensor:
    """Fills `out` with standard normal numbers, one group after another.

    Args:
        out: tensor on the CPU, of any strides. In bfloat16 the numbers are those of float32, rounded to nearest.
        state: state of the generator, 256 bits.
    """
    count = -(-out.numel() // (GROUP * _LANES)) * _LANES
    indices = torch.from_numpy(_indices(state, count))
    direct = out.is_contiguous() and out.dtype in _LOOKED_UP_AS
    flat = out.view(-1) if direct else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
    for start in range(0, len(flat), _AT_A_TIME):
        stop = start + _AT_A_TIME
        _look_up(indices[start // GROUP : stop // GROUP], flat[start:stop])
    return out if direct else out.copy_(flat.view(out.shape))


def _look_up(indices: Tensor, out: Tensor) -> None:
    """Out <- the groups with these indices, one after another; the last ones may not fit."""
    whole, shape = _LOOKED_UP_AS[out.dtype], (_LANES, len(indices) // _LANES)
    places = scratch("places", shape, torch.int64, indices.device).copy_(indices.view(shape))
    fits = len(out) == GROUP * len(indices) and out.data_ptr() % whole.itemsize == 0
    numbers = out if fits else scratch("groups", (GROUP * len(indices),), out.dtype, out.device)
    torch.gather(_table(out.dtype).expand(_LANES, -1), 1, places, out=numbers.view(whole).view(shape))
    if not fits:
        out.copy_(numbers[: len(out)])


_LOOKED_UP_AS = {torch.bfloat16: torch.int64, torch.float32: torch.complex128}
"""A dtype with the size of a group, for each dtype of its numbers."""


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """The groups in a dtype, each as one number: (2^16,)."""
    return groups().to(dtype).view(_LOOKED_UP_AS[dtype]).squeeze(1)


@cache
def groups() -> Tensor:
    """The 2^16 equally likely groups: (2^16, 4), float32.

    The Sobol' sequence takes each of 2^16 quantiles once in each of the four numbers.
    """
    sobol = torch.quasirandom.SobolEngine(GROUP)  # type: ignore[no-untyped-call]
    points = sobol.draw(_SIZE, dtype=torch.float64).mul_(_SIZE).numpy().astype(np.uint16)
    k = np.stack([_scrambled(points[:, i], seed) for i, seed in enumerate(_SCRAMBLES)], axis=1)
    z = torch.from_numpy((2.0 * k + 1) / _SIZE - 1).erfinv_().mul_(2**0.5)
    root = torch.linalg.cholesky(z.T @ z / _SIZE)
    white: Tensor = torch.linalg.solve_triangular(root, z.T, upper=False)
    return white.T.float().contiguous()


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


def _indices(state: int, count: int) -> np.ndarray:
    """`count` indices, a multiple of 4, from an SFC64 generator in this state: (count,), uint16."""
    words = np.frombuffer(state.to_bytes(32, "little"), "<u8").astype(np.uint64)
    _own.bits.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
    drawn: np.ndarray = _own.bits.random_raw(count // 4).view(np.uint16)
    return drawn
