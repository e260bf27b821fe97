"""Products with a matrix made tile by tile: against the whole matrix in float64, for every shape and tiling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_gpt2, tiny_llama, tiny_opt
from torch.nn import functional

from tezo.directions import products
from tezo.directions import products as emulation
from tezo.directions.products import float32_addmm, float32_linear, float32_on_emulating_cpu, is_emulated
from tezo.forward.dense import grouped

MODELS = {"opt": tiny_opt, "gpt2": tiny_gpt2, "llama": tiny_llama}
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close_to_rounding(half: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within one rounding to the half format, and a little for the float32 sums."""
    bound = 0.5 * torch.finfo(half.dtype).eps * exact.abs() + 1e-5 * (1 + exact.abs())
    return bool(((half.double() - exact).abs() <= bound).all())


@HALF
@pytest.mark.parametrize("tile", [1, 64, 1 << 19])
@pytest.mark.parametrize(("height", "width"), [(7, 5), (64, 64), (1, 33), (130, 3)])
@pytest.mark.parametrize("leading", [(1,), (3, 40)])
def test_wide_products_are_rounded_once(monkeypatch, dtype, tile, height, width, leading):
    monkeypatch.setattr(products, "TILE", tile)
    x = normal(*leading, width, dtype=dtype)
    weight, bias = normal(height, width, dtype=dtype, seed=1), normal(height, dtype=dtype, seed=2)
    for b in (bias, None):
        out = float32_linear(x, weight, b)
        exact = functional.linear(x.double(), weight.double(), None if b is None else b.double())
        assert out.shape == exact.shape and out.dtype == dtype and close_to_rounding(out, exact)
    flat = x.reshape(-1, width)
    out = float32_addmm(bias, flat, weight.T.contiguous())
    assert close_to_rounding(out, torch.addmm(bias.double(), flat.double(), weight.T.double()))


def emulating(monkeypatch: pytest.MonkeyPatch, *, has: bool) -> None:
    monkeypatch.setattr(emulation, "relative_time", lambda _: 0.5 if has else 2.0)


@HALF
@pytest.mark.parametrize("family", ["opt", "gpt2", "llama"])
def test_a_model_in_half_precision_gets_nearer_to_its_exact_outputs(monkeypatch, family, dtype):
    emulating(monkeypatch, has=False)
    ids = torch.randint(90, (4, 12), generator=torch.Generator().manual_seed(0))
    errors = {"stock": 0.0, "wide": 0.0}
    used = []
    for name in ("float32_linear", "float32_addmm"):
        original = getattr(emulation, name)
        monkeypatch.setattr(emulation, name, lambda *args, f=original: used.append(1) or f(*args))
    for seed in range(4):
        model = MODELS[family](dtype, seed=seed)
        exact_model = MODELS[family](torch.float64, seed=seed)
        exact_model.load_state_dict(model.state_dict())
        with torch.no_grad():
            exact = exact_model(ids).logits
            errors["stock"] += float((model(ids).logits.double() - exact).square().mean())
            assert not used
            with float32_on_emulating_cpu(model):
                errors["wide"] += float((model(ids).logits.double() - exact).square().mean())
            assert used
            used.clear()
    assert errors["wide"] < 1.02 * errors["stock"]


def test_where_there_are_instructions_or_no_half_weights_nothing_is_replaced(monkeypatch):
    emulating(monkeypatch, has=False)
    assert is_emulated(torch.bfloat16) and is_emulated(torch.float16)
    assert not is_emulated(torch.float32) and not is_emulated(torch.float64)
    float32 = MODELS["opt"](torch.float32)
    assert type(float32_on_emulating_cpu(float32)).__name__ == "nullcontext"
    emulating(monkeypatch, has=True)
    assert not is_emulated(torch.bfloat16)
    assert type(float32_on_emulating_cpu(MODELS["opt"](torch.bfloat16))).__name__ == "nullcontext"


@HALF
def test_few_rows_and_other_dtypes_take_the_stock_product(monkeypatch, dtype):
    emulating(monkeypatch, has=False)
    taken = []
    monkeypatch.setattr(emulation, "float32_linear", lambda x, *_: taken.append(len(x)) or x)
    least, half = emulation.LEAST_ROWS[dtype], normal(8, 8, dtype=dtype)
    with float32_on_emulating_cpu(torch.nn.Linear(8, 8, dtype=dtype)):
        for rows in (least - 1, least):
            functional.linear(normal(rows, 8, dtype=dtype), half)
        functional.linear(normal(64, 8, dtype=torch.float32), half.float())
    assert taken == [least]


@given(height=st.integers(1, 5), count=st.integers(1, 12), last=st.integers(1, 5), most=st.integers(1, 70))
def test_joined_tiles_cover_the_same_rows_in_groups_of_like_size(height, count, last, most):
    ends = [height * (i + 1) for i in range(count)] + [height * count + min(last, height)]
    tiles = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    groups = grouped((ends[-1], 1), height, most)
    assert [tile for group in groups for tile in group] == tiles
    sizes = [group[-1].stop - group[0].start for group in groups]
    assert max(sizes) < most + height
    assert len(groups) <= -(-ends[-1] // most)
