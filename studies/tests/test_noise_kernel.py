"""The noise kernel, run by Triton's interpreter, against Philox written down in torch."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton (pip install triton)")

LOW = 0xFFFFFFFF
WORDS = 512


def philox(seed, counter):
    """Philox 4x32 with 10 rounds (Salmon et al. 2011), counters (c, 0, 0, 0): four words each, as int64."""
    x = [counter.clone(), *(torch.zeros_like(counter) for _ in range(3))]
    key = [seed & LOW, seed >> 32]
    for _ in range(10):
        (high0, low0), (high1, low1) = (_product(0xD2511F53, x[0]), _product(0xCD9E8D57, x[2]))
        x = [high1 ^ x[1] ^ key[0], low1, high0 ^ x[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & LOW, (key[1] + 0xBB67AE85) & LOW]
    return x


def _product(a, b):
    """The upper and the lower 32 bits of a product of numbers of 32 bits, without overflow of 63."""
    low, mid = (a & 0xFFFF) * b, (a >> 16) * b
    total = low + ((mid & 0xFFFF) << 16)
    return ((mid >> 16) + (total >> 32)) & LOW, total & LOW


def in_places(words, count):
    """The k-th word of call j of each program lies at k * WORDS + j."""
    return torch.stack([word.view(-1, WORDS) for word in words], 1).flatten()[:count]


def calls(count):
    return torch.arange(-(-count // (4 * WORDS)) * WORDS)


def expected_normal(seed, count):
    words = [
        torch.where(word >= 1 << 31, LOW - word, word) for word in philox(seed, calls(count))
    ]  # of a signed number
    u = [(word.float() * torch.tensor(4.6566127342e-10)).double() for word in words]
    radius = [torch.sqrt(-2 * u[i].clamp_min(1e-7).log()) for i in (0, 2)]
    angle = [2 * torch.pi * u[i] for i in (1, 3)]
    z = [radius[i] * part for i in (0, 1) for part in (angle[i].cos(), angle[i].sin())]
    return in_places(z, count)


KERNEL = """
import torch
from tezo_studies.bench.noise_kernel import add_normal_
given = torch.load({given!r}, weights_only=False)
for weight, *settings in given:
    add_normal_(weight, *settings)
torch.save([weight for weight, *_ in given], {found!r})
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Runs the kernel in a process whose Triton interprets; a process that has Triton otherwise cannot."""
    folder = tmp_path_factory.mktemp("kernel")

    def run(*given):
        paths = {"given": str(folder / "given.pt"), "found": str(folder / "found.pt")}
        torch.save([list(one) for one in given], paths["given"])
        env = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-c", KERNEL.format(**paths)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return torch.load(paths["found"])

    return run


def test_words_are_the_published_ones_of_philox():
    # the known answer of the authors' library for counter and key 0
    assert [int(word) for word in philox(0, torch.tensor([0]))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_its_numbers_are_those_of_philox_and_are_drawn_again(interpreted):
    seed, count = (7 << 32) + 5, 5000
    (noise, matrix, whole) = interpreted(
        (torch.zeros(count), 1.0, seed), (torch.zeros(50, 100), 1.0, seed), (torch.zeros(2 * count), 1.0, seed)
    )
    assert torch.allclose(noise.double(), expected_normal(seed, count), atol=2e-6)
    assert torch.equal(matrix.flatten(), noise) and torch.equal(whole[:count], noise)
    assert abs(float(noise.mean())) < 0.06 and float(noise.var()) == pytest.approx(1, abs=0.08)
    moved, back, other = interpreted(
        (torch.ones(count, dtype=torch.float32), 1e-3, 9),
        (torch.zeros(count), -1e-3, 9),
        (torch.zeros(count), 1e-3, 10),
    )
    assert torch.allclose(moved + back, torch.ones(count), atol=2e-7) and not torch.equal(-back, other)


def test_bfloat16_is_rounded_to_a_neighbour_by_the_words_at_hand(interpreted):
    count, seed, rounding = 6000, 3, 4
    before = torch.linspace(-2, 2, count).bfloat16()
    nearest, stochastic = interpreted((before.clone(), 1e-3, seed), (before.clone(), 1e-3, seed, rounding))
    (noise,) = interpreted((torch.zeros(count), 1.0, seed))
    exact = before.float() + torch.tensor(1e-3) * noise
    assert torch.equal(nearest, exact.bfloat16())
    bits = in_places(philox(rounding, calls(count)), count) & 0xFFFF
    carried = ((exact.view(torch.int32) + bits.int()) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(stochastic, carried)
    moved = float((stochastic.float() - exact).mean())
    assert abs(moved) < 2e-4 and not torch.equal(stochastic, nearest)


def test_infinities_and_weights_that_it_does_not_take(interpreted):
    edge = torch.tensor([float("inf"), float("-inf"), float("nan"), torch.finfo(torch.bfloat16).max]).bfloat16()
    (found,) = interpreted((edge.clone(), 1e-3, 1, 2))
    assert torch.equal(found.isnan(), edge.isnan()) and torch.equal(found.nan_to_num(), edge.nan_to_num())
    for weight, rounding in ((torch.zeros(4, 4).T[1:], None), (torch.zeros(4), 1)):
        with pytest.raises(AssertionError, match="takes contiguous weights"):
            interpreted((weight, 1.0, 1, rounding))


STEPPED = """
import torch
from tezo_studies.bench.cases import make_case
from tezo_studies.bench.settings import Settings
from tezo_studies.bench.workload import Work
work = Work(Settings(model="tiny", batch=2, length="6"))
before = {name: weight.clone() for name, weight in work.model.named_parameters()}
case = make_case("kernel:mezo", work)
case.run()
torch.set_grad_enabled(False)
algorithm = case._algorithm
from tezo.directions.random import seed_of
from tezo_studies.bench.noise_kernel import add_normal_
scales = set()
for name, weight in algorithm.parameters:
    noise = torch.zeros_like(weight)
    add_normal_(noise, 1.0, seed_of(0, 0, name))
    change = (weight.data - before[name]) / -algorithm.lr
    kappa = float((change * noise).sum() / noise.square().sum())
    assert (change - kappa * noise).abs().max() < 0.1 * abs(kappa) + 0.5, name
    scales.add(round(kappa, 1))
assert len(algorithm.parameters) == 12 and max(scales) - min(scales) < 0.2, scales
"""


@pytest.mark.slow
def test_a_step_with_it_is_along_its_noise_by_one_kappa_for_all_weights():
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", STEPPED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
