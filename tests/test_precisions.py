"""Every method in every precision, on all weights and on adapters: steps are finite, small, and taken back if not."""

from typing import Any

import pytest
import torch
from cases import CASES, mostly_slow
from tiny import lm_loss, tiny_opt, tokens

from tezo.methods import BASELINES, method
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.peft import add_adapter
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.system.errors import NonFiniteLossError, RunError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PEFT = ("none", "lora", "prefix", "prompt")
EACH = [(name, dtype, peft) for name in (*CASES, *BASELINES) for dtype in DTYPES for peft in PEFT]
FAST = [("adam", "float16", "none"), ("tezo-adam", "bfloat16", "lora"), ("mezo-adam", "float16", "prefix")]


def optimizer_of(name: str, dtype: str, peft: str) -> BaseOptimizer:
    base = LoadedModel(tiny_opt(DTYPES[dtype]), None, "causal")
    model = add_adapter(base, ModelConfig(name="tiny", peft=peft, lora_rank=2, prefix_length=3), seed=0).model
    options: dict[str, Any] = dict(CASES[name].options) if name in CASES else {}
    return method(name).build(model, lr=1e-3, targets=("all",), **options)


@pytest.mark.parametrize("case", mostly_slow(EACH, *FAST), ids="-".join)
def test_steps_are_finite_and_a_step_that_is_not_is_taken_back(case):
    optimizer = optimizer_of(*case)
    start = optimizer.tuned_state()
    losses = [optimizer.step(lm_loss(optimizer.model, tokens(seed=i))) for i in range(4)]
    after = optimizer.tuned_state()
    assert all(torch.isfinite(value).all() for value in after.values() if value.is_floating_point())
    assert any(not torch.equal(value, start.get(key, torch.zeros_like(value))) for key, value in after.items())
    assert max(losses) < 2 * losses[0], "a step of 1e-3 is a small one"
    with pytest.raises((NonFiniteLossError, RunError)):
        optimizer.step(lambda: lm_loss(optimizer.model, tokens(seed=1))() * torch.inf)
    assert all(torch.equal(value, after[key]) for key, value in optimizer.tuned_state().items())
    again = optimizer.step(lm_loss(optimizer.model, tokens(seed=0)))
    assert optimizer.num_steps == 5 and again < 2 * losses[0]
