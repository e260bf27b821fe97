"""Draws. Each is a pure function of (seed, step, name, role); the global generators are neither read nor set.

Low-rank factors, temporal factors and cores come from `normal`: NumPy's Philox with a 128-bit key, in
float64 on the CPU, then cast, so that a step log replays on any device and with any number of threads.
(torch's CPU generator keeps 32 bits of its seed: over a long run of a large model some draws would repeat.)
Dense noise is too large for that and comes from `generator` on the parameter's own device.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


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
    return torch.from_numpy(np.random.Generator(bits).standard_normal(shape))


def permutation(length: int, *, seed: int, step: int, name: str) -> list[int]:
    """A random order of `range(length)`."""
    bits = np.random.Philox(key=_digest(seed, step, name, "permutation", 16))
    return [int(i) for i in np.random.Generator(bits).permutation(length)]


def generator(device: torch.device, *, seed: int, step: int, name: str, role: str) -> torch.Generator:
    """A torch generator on `device`, for dense noise; its stream depends on the device's type."""
    made = torch.Generator(device)
    made.manual_seed(_digest(seed, step, name, role, 8))
    return made
