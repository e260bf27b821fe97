"""A draw is a function of (seed, step, name, role) and of nothing else."""

import itertools
import math
import random as python_random

import numpy as np
import pytest
import torch
from cases import CASES, every_method_fast_for_kinds
from hypothesis import given
from hypothesis import strategies as st
from tiny import lm_loss, tiny_opt, tokens
from torch import Tensor

from tezo.directions import random
from tezo.directions.spaces import Dense

CPU = torch.device("cpu")
Key = tuple[int, int, str, str]


def dense(seed: int, step: int, name: str, role: str) -> Tensor:
    out = torch.empty(50, 20, dtype=torch.float64)
    return random.fill_normal_(out, seed=seed, step=step, name=name, role=role)


def factors(seed: int, step: int, name: str, role: str) -> Tensor:
    return random.normal((50, 20), seed=seed, step=step, name=name, role=role)


KINDS = pytest.mark.parametrize("draw", [factors, dense])
KEYS: list[Key] = list(itertools.product((0, 1), (0, 1, 10), ("a.weight", "b.weight"), ("u.0", "u.1")))


@KINDS
def test_a_draw_does_not_depend_on_the_draws_before_it(draw):
    first = {key: draw(*key) for key in KEYS}
    shuffled = python_random.Random(0).sample(KEYS, len(KEYS))
    again = {key: draw(*key) for key in shuffled}
    assert all(torch.equal(first[key], again[key]) for key in KEYS)


@KINDS
def test_a_draw_does_not_depend_on_the_number_of_threads(draw):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = draw(*KEYS[0])
        torch.set_num_threads(2)
        two = draw(*KEYS[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)


@KINDS
def test_seed_step_name_and_role_each_make_another_draw(draw):
    # Two independent draws of 1000 numbers correlate by less than 6/sqrt(1000) with probability 1 - 2e-9.
    drawn = [draw(*key).flatten() for key in KEYS]
    for a, b in itertools.combinations(drawn, 2):
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 6 / math.sqrt(1000)


@KINDS
@pytest.mark.parametrize(
    ("key", "other"),
    [
        ((1, 11, "w", "u"), (11, 1, "w", "u")),
        ((1, 1, "1w", "u"), (1, 11, "w", "u")),
        ((0, 0, "w.a", "u"), (0, 0, "w", ".au")),
    ],
    ids=["seed-step", "step-name", "name-role"],
)
def test_keys_that_read_alike_when_run_together_do_not_collide(draw, key, other):
    assert not torch.equal(draw(*key), draw(*other))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed_and_its_high_bits_count(seed):
    numbers = random.normal((4,), seed=seed, step=0, name="w", role="u")
    noise = dense(seed, 0, "w", "z")
    assert torch.isfinite(numbers).all()
    assert not torch.equal(numbers, random.normal((4,), seed=seed + 2**32, step=0, name="w", role="u"))
    assert not torch.equal(noise, dense(seed + 2**32, 0, "w", "z"))


@KINDS
def test_draws_are_standard_normal_by_their_moments(draw):
    # Over n draws the k-th moment has standard error sqrt((E x^2k - (E x^k)^2) / n); six of them: 2e-9.
    x = torch.cat([draw(seed, 0, "w", "u").flatten() for seed in range(200)])
    moments = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10395 - 225)}
    for k, (mean, variance) in moments.items():
        assert abs(float((x**k).mean()) - mean) < 6 * math.sqrt(variance / len(x)), k


def test_dense_noise_fills_a_tensor_however_it_lies_in_memory():
    key = {"seed": 3, "step": 1, "name": "w", "role": "z"}
    transposed = random.fill_normal_(torch.empty(4, 3).T, **key)
    assert torch.equal(transposed, random.fill_normal_(torch.empty(3, 4), **key))
    unaligned = random.fill_normal_(torch.empty(257)[1:], **key)
    assert torch.equal(unaligned, random.fill_normal_(torch.empty(256), **key))


def test_factor_draws_are_float64_on_the_cpu_in_the_shape_asked_for():
    for shape in ((), (0,), (3,), (2, 3), (2, 3, 4)):
        drawn = random.normal(shape, seed=0, step=0, name="w", role="u")
        assert drawn.shape == shape and drawn.dtype == torch.float64 and drawn.device == CPU


@given(length=st.integers(0, 40), seed=st.integers(0, 5), step=st.integers(0, 5))
def test_a_permutation_is_one_and_repeats(length, seed, step):
    order = random.permutation(length, seed=seed, step=step, name="epoch")
    assert sorted(order) == list(range(length))
    assert order == random.permutation(length, seed=seed, step=step, name="epoch")


def test_permutations_put_every_element_first_equally_often():
    # Counts of 2000 draws among 5: chi-squared with 4 degrees of freedom exceeds 33 with probability 1e-6.
    first = [random.permutation(5, seed=seed, step=0, name="epoch")[0] for seed in range(2000)]
    chi_squared = sum((first.count(i) - 400) ** 2 / 400 for i in range(5))
    assert chi_squared < 33


def global_state() -> tuple[object, ...]:
    kind, keys, position, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), python_random.getstate(), kind, keys.tolist(), position, rest


@every_method_fast_for_kinds
def test_a_step_neither_reads_nor_sets_the_global_generators(case):
    def run(seed: int) -> tuple[list[float], bool]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        python_random.seed(seed)
        before = global_state()
        model = tiny_opt()
        optimizer = case.build(model, targets=("all",))
        losses = [optimizer.step(lm_loss(model, tokens())) for _ in range(7)]
        optimizer.merge()
        return losses, global_state() == before

    (losses, untouched), (other_losses, other_untouched) = run(1), run(2)
    assert untouched and other_untouched
    assert losses == other_losses


def test_a_bf16_step_with_stochastic_rounding_leaves_the_global_generators_alone():
    before = global_state()
    model = tiny_opt(torch.bfloat16)
    optimizer = CASES["tezo-adam"].build(model)
    optimizer.step(lm_loss(model, tokens()))
    assert global_state() == before


@given(rows=st.integers(1, 9), columns=st.integers(1, 9))
def test_dense_noise_is_the_same_at_every_call(rows, columns):
    noise = Dense(
        shape=torch.Size((rows, columns)), device=torch.device("cpu"), dtype=torch.float64, seed=0, step=1, name="w"
    )
    z = torch.cat([values.clone() for _, values in noise.tiles()])
    for alpha in (1.0, -2.0):
        weight = torch.ones(rows, columns, dtype=torch.float64)
        noise.add_to_(weight, alpha)
        torch.testing.assert_close(weight, 1 + alpha * z)


def test_dense_noise_covers_a_parameter_of_several_tiles_once(monkeypatch):
    monkeypatch.setattr("tezo.directions.spaces.TILE", 8)
    noise = Dense(shape=torch.Size((7, 3)), device=torch.device("cpu"), dtype=torch.float64, seed=0, step=1, name="w")
    tiles = [(rows, values.clone()) for rows, values in noise.tiles()]
    assert [row for rows, _ in tiles for row in range(7)[rows]] == list(range(7))
    assert len(tiles) == 4 and all(values.numel() <= 8 for _, values in tiles)
    z = torch.cat([values for _, values in tiles])
    assert not any(torch.equal(a[1][:1], b[1][:1]) for a, b in itertools.combinations(tiles, 2)), "tiles repeat"
    weight = torch.zeros(7, 3, dtype=torch.float64)
    noise.add_to_(weight, 1.0)
    assert torch.equal(weight, z)


@pytest.mark.parametrize(
    ("name", "options", "elements"),
    # The paper's table of sampled elements, for an M x N weight after T steps; LOZO and SubZO keep factors for nu.
    [
        ("mezo", {}, lambda m, n, t: m * n * t),
        ("tezo", {"rank": 3}, lambda m, n, t: (m + n + t) * 3),
        ("tezo-adam", {"rank": 3}, lambda m, n, t: (m + n + t) * 3),
        ("lozo", {"rank": 3, "lazy_update_interval": 4}, lambda m, n, t: (m * t + n * -(-t // 4)) * 3),
        ("subzo", {"rank": 3, "lazy_update_interval": 4}, lambda m, n, t: (m + n) * 3 * -(-t // 4) + 9 * t),
    ],
)
def test_as_many_numbers_are_drawn_as_the_paper_counts(name, options, elements):
    m, n, steps = 7, 5, 10
    model = torch.nn.Sequential(torch.nn.Linear(n, m, bias=False))
    x = torch.ones(2, n)
    with random.count_draws() as drawn:
        optimizer = CASES[name].build(model, **options)
        for _ in range(steps):
            optimizer.step(lambda: model(x).square().mean())
    assert sum(dict(drawn).values()) == elements(m, n, steps)


def signs_of(step=0, length=1003):
    return random.Signs(length, {"seed": 1, "step": step, "name": "w", "role": "u.0"})


def test_signs_of_an_example_depend_on_it_alone():
    whole = signs_of()(range(40), torch.float64, CPU)
    assert whole.shape == (40, 1003) and set(whole.unique().tolist()) == {-1.0, 1.0}
    assert (whole[0] == 1).all(), "the first example has the shared direction"
    asked = signs_of()
    for examples in ([7], [31, 2], range(3, 9), [0, 39]):
        assert torch.equal(asked(examples, torch.float64, CPU), whole[list(examples)])
    assert not torch.equal(signs_of(step=1)(range(40), torch.float64, CPU)[1:], whole[1:])


def test_signs_are_fair_and_uncorrelated():
    # sums of n independent signs have mean 0 and variance n; bounds at 5 standard deviations, union over all sums
    signs = signs_of(length=4096)(range(65), torch.float64, CPU)[1:]
    assert signs.sum(1).abs().max() < 5 * 4096**0.5 and signs.sum(0).abs().max() < 5.5 * 64**0.5
    gram = signs @ signs.T
    assert (gram - gram.diag().diag()).abs().max() < 5.5 * 4096**0.5


def test_bits_are_unpacked_on_a_device_as_on_a_cpu():
    packed = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    for length in (49, 51, 56):
        expected = torch.from_numpy(np.unpackbits(packed, axis=1, count=length))
        assert torch.equal(random.unpacked(torch.from_numpy(packed), length), expected)


def test_a_generator_that_is_used_again_begins_its_stream_anew():
    for seed in (5, 2**63 + 5, 5):
        fresh = torch.Generator("cpu")
        fresh.manual_seed(seed)
        drawn = torch.empty(3).normal_(generator=random._reseeded(torch.device("cpu"), seed))
        assert torch.equal(drawn, torch.empty(3).normal_(generator=fresh))
