"""Normal numbers in groups of four: the law of a group, over the whole table, and independence of the groups."""

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tezo.directions import random
from tezo.directions import random as noise_table

KEY = {"seed": 3, "step": 1, "name": "w", "role": "z"}
NORMAL = {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0}
"""E z^k of a standard normal number."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def groups(dtype: torch.dtype = torch.float32) -> Tensor:
    """The groups, as they are in a dtype: (2^16, 4), float64."""
    return noise_table.groups().to(dtype).double()


def draw(count: int, dtype: torch.dtype = torch.float32, **key: object) -> Tensor:
    return random.fill_normal_(torch.empty(count, dtype=dtype), **(KEY | key))


@DTYPES
def test_a_group_has_mean_zero_and_the_identity_as_second_moments(dtype):
    # exactly, up to the rounding of 2^16 numbers: independent numbers instead of a table would be off by 4e-3
    z, bound = groups(dtype), {torch.float32: 1e-8, torch.bfloat16: 1e-5}[dtype]
    assert float(z.mean(0).abs().max()) < bound
    assert float((z.T @ z / len(z) - torch.eye(4, dtype=torch.float64)).abs().max()) < bound


@DTYPES
def test_joint_moments_of_degree_3_and_4_are_those_of_independent_normal_numbers(dtype):
    # 2^16 points drawn at random would be off by 0.01 to 0.04 in degree 4
    for degrees in itertools.product(range(5), repeat=4):
        bound = {3: 3e-4, 4: 2e-3}.get(sum(degrees))
        if bound is not None:
            moment = float((groups(dtype) ** torch.tensor(degrees)).prod(1).mean())
            assert abs(moment - math.prod(NORMAL[degree] for degree in degrees)) < bound, degrees


def test_each_number_of_a_group_is_distributed_normally_into_the_tails():
    k = torch.arange(2**16, dtype=torch.float64)
    quantiles = math.sqrt(2) * torch.special.erfinv((2 * k + 1) / 2**16 - 1)
    for z in groups().T:
        assert float((z.sort().values - quantiles).abs().max()) < 4e-4
        for bound, expected in ((1.0, 20795), (2.0, 2982), (3.0, 176.9), (4.0, 4.15)):
            assert abs(int((z.abs() > bound).sum()) - expected) <= 2 + 1e-4 * expected, bound
        assert 4.32 < float(z.abs().max()) < 4.33


@pytest.mark.parametrize("kind", ["one-entry", "one-group", "random"])
def test_the_estimate_of_a_gradient_within_a_group_has_the_mean_and_variance_of_normal_noise(kind):
    # f(z) = g . z: E[(g . z) z] = g, and E |(g . z) z|^2 = (d + 2) |g|^2 with d = 4 (degree 4, so up to 0.001)
    seeded = torch.Generator().manual_seed(0)
    gradients = {
        "one-entry": torch.eye(4),
        "one-group": torch.ones(1, 4),
        "random": torch.randn(9, 4, generator=seeded),
    }
    for g in gradients[kind].double():
        estimates = (groups() @ g).unsqueeze(1) * groups()
        torch.testing.assert_close(estimates.mean(0), g, rtol=0, atol=1e-7)
        assert float(estimates.square().sum(1).mean() / g.square().sum()) == pytest.approx(6, abs=6e-3)


def test_the_groups_are_those_of_this_version():
    # Logs are replayed with them. Another table needs another `NOISE_VERSION`.
    digest = hashlib.sha256(noise_table.groups().numpy().astype("<f4").tobytes()).hexdigest()
    assert (noise_table.NOISE_VERSION, digest[:16]) == (2, "a3b9ab2054bbb547")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (7,), (0,), (3, 5), (1, 70), (16, 32), (2, 3, 4), (0, 4), (30, 100)])
@pytest.mark.parametrize("at_a_time", [noise_table._AT_A_TIME, 512], ids=["whole", "in-parts"])
def test_a_draw_is_the_groups_that_its_bits_name(monkeypatch, shape, dtype, at_a_time):
    monkeypatch.setattr(noise_table, "_AT_A_TIME", at_a_time)
    drawn = random.fill_normal_(torch.empty(shape, dtype=dtype), **KEY)
    indices = stream(random._digest(*KEY.values(), 32), -(-drawn.numel() // 4))
    expected = noise_table.groups()[torch.from_numpy(indices.astype(np.int64))].flatten()[: drawn.numel()]
    assert torch.equal(drawn.flatten(), expected.to(dtype))


def stream(state: int, count: int) -> np.ndarray:
    """`count` numbers of 16 bits of SFC64, in plain integers."""
    mask = 2**64 - 1
    a, b, c, counter = (state >> 64 * i & mask for i in range(4))
    words = []
    for _ in range(-(-count // 4)):
        word = (a + b + counter) & mask
        counter = (counter + 1) & mask
        a, b = b ^ b >> 11, (c + (c << 3)) & mask
        c = ((c << 24 | c >> 40) + word) & mask
        words.append(word)
    return np.array(words, "<u8").view("<u2")[:count]


def test_a_draw_does_not_depend_on_the_number_of_threads():
    threads, drawn = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            drawn.append(draw(1 << 19))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("lag", [4, 5, 8, 3072, 4 * 3072])
def test_numbers_of_different_groups_of_a_draw_are_independent(lag):
    # lags: the next group, the group after it, the same column some rows below; over n pairs the covariances of z, of
    # z^2 and of both have standard errors 1, 2 and sqrt(2) over sqrt(n): 6 of them, 2e-9 each
    z = draw(1 << 20).double()
    check_independent(z[:-lag], z[lag:])


@pytest.mark.parametrize("other", [{"seed": 4}, {"step": 2}, {"name": "v"}, {"role": "z.768"}], ids=lambda x: min(x))
def test_numbers_of_different_steps_matrices_and_tiles_are_independent(other):
    check_independent(draw(1 << 20).double(), draw(1 << 20, **other).double())


def check_independent(a: Tensor, b: Tensor) -> None:
    wide = len(a) ** 0.5
    assert abs(float((a * b).mean())) * wide < 6
    assert abs(float(((a * a - 1) * (b * b - 1)).mean())) * wide < 6 * 2
    assert abs(float((a * (b * b - 1)).mean())) * wide < 6 * 2**0.5


def test_every_group_is_drawn_equally_often():
    # n = 2^22 indices in 2^16 cells: chi-squared has mean 65535 and standard deviation 362; within 6 of them: 2e-9
    indices = noise_table._indices(random._digest(*KEY.values(), 32), 1 << 22)
    counts = np.bincount(indices, minlength=1 << 16)
    chi_squared = float(((counts - 64.0) ** 2 / 64).sum())
    assert abs(chi_squared - 65535) < 6 * 362
