"""An adapter that is called exact is exact in PEFT, over every family of transformers that builds here."""

import json
from pathlib import Path

import peft
import pytest
from folders import completion_rows, saved, tezo, tokenizer_for, train, write_rows
from torch import Tensor, nn
from zoo import CLASSES, zoo_logits, zoo_model

from tezo.directions.targets import find_targets, never_called
from tezo.methods import METHODS
from tezo.models.lora import make_adapter, save_adapter
from tezo.models.peft import why_not_in_peft
from tezo.models.saving import export_adapter
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.system.errors import RequestError

FAST = ("causal-llama", "causal-laguna", "causal-deepseek_v3", "causal-mamba", "causal-qwen3_moe", "masked-bert")
FAMILIES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]
ODD = ("glm4_moe", "mamba")


def built(name: str) -> tuple[nn.Module, Tensor]:
    """(a model, its logits); skips where the family does not build from these sizes."""
    try:
        model = zoo_model(name)
        return model, zoo_logits(model)
    except Exception as error:
        pytest.skip(f"does not build: {type(error).__name__}: {' '.join(str(error).split())[:100]}")


def tuned(model: nn.Module, left_out: str | None = None) -> ZerothOrderOptimizer:
    idle = never_called(find_targets(model), lambda: zoo_logits(model))
    targets = ["all-linear", *(f"!{target.name}" for target in idle), *([left_out] if left_out else [])]
    optimizer = METHODS["tezo-cadam"].build(model, lr=0.03, rho=1e-2, rank=1, targets=targets)
    for _ in range(3):
        optimizer.step(lambda: zoo_logits(model).square().mean())
    return optimizer


def in_peft(name: str, folder) -> Tensor | None:
    """Logits of a model with the adapter in `folder`; None where PEFT refuses."""
    try:
        return zoo_logits(peft.PeftModel.from_pretrained(zoo_model(name), folder).eval())
    except ValueError:
        return None


def is_close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-4 * expected.abs().max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_is_exact_in_peft_or_refused_with_a_reason_that_holds(name, tmp_path):
    model, before = built(name)
    if not any(target.is_linear for target in find_targets(model)):
        pytest.skip("no linear layer that all-linear means")
    optimizer = tuned(model)
    expected, adapter = zoo_logits(model), make_adapter(optimizer)
    assert not is_close(expected, before)
    reason = why_not_in_peft(adapter, model, tmp_path)
    if reason is None:
        export_adapter(optimizer, tmp_path / "adapter")
        assert is_close(in_peft(name, tmp_path / "adapter"), expected)
        return
    with pytest.raises(RequestError, match=r"there is no exact adapter, because PEFT .*; export the merged model"):
        export_adapter(optimizer, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    save_adapter(adapter, tmp_path / "adapter", model=model, base="")
    loaded = in_peft(name, tmp_path / "adapter")
    assert loaded is None or not is_close(loaded, expected)
    model.save_pretrained(tmp_path / "whole")
    assert is_close(zoo_logits(type(model).from_pretrained(tmp_path / "whole")), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ODD)
def test_layers_that_peft_takes_alone_are_exact(family, tmp_path):
    name = f"causal-{family}"
    model, _ = built(name)
    optimizer = tuned(model, left_out={"glm4_moe": "!*mlp*", "mamba": "!out_proj"}[family])
    assert why_not_in_peft(make_adapter(optimizer), model, tmp_path) is None


def odd_folder(family: str, root) -> Path:
    """The folder of a model of a family whose adapters PEFT does not take, with a tokenizer for rows."""
    tokenizer = tokenizer_for("llama")
    model = zoo_model(f"causal-{family}", vocab_size=len(tokenizer), max_position_embeddings=160)
    return saved(model, tokenizer, root / "base")


@pytest.mark.parametrize("family", ODD)
def test_a_run_whose_adapter_is_not_exact_in_peft_ends_with_the_whole_model(family, tmp_path):
    base = odd_folder(family, tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", completion_rows(8))
    done = train(base, data, tmp_path / "run", "--test", data, method__rank=1, steps=3)
    assert done.code == 0, done.err
    assert "(no adapter: PEFT " in done.out
    assert not (tmp_path / "run" / "adapter").exists()
    refused = tezo("export", tmp_path / "run", "--output", tmp_path / "lora")
    assert refused.code != 0 and "use the format merged" in refused.err
    assert tezo("export", tmp_path / "run", "--format", "merged", "--output", tmp_path / "merged").code == 0
    after, merged = (tezo("eval", place, "--json", "--data", data) for place in (tmp_path / "run", tmp_path / "merged"))
    assert after.code == 0 and after.out == merged.out


def test_over_a_packed_base_such_a_run_keeps_its_adapter_for_this_library(tmp_path):
    pytest.importorskip("torchao", reason="the base is packed by torchao")
    base = odd_folder("glm4_moe", tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", completion_rows(8))
    flags = ("--test", data, "--set", "model.quantization=int8wo")
    done = train(base, data, tmp_path / "run", *flags, method__rank=1, steps=3)
    assert done.code == 0, done.err
    assert "for tezo alone: PEFT " in done.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["result"]["kind"] == "adapter" and summary["result"]["why_not_in_peft"].startswith("PEFT ")
    measured = tezo("eval", tmp_path / "run", "--json")
    assert json.loads(measured.out)["loss"] == pytest.approx(summary["after"]["loss"], abs=1e-5)
    refused = tezo("export", tmp_path / "run", "--output", tmp_path / "lora")
    assert refused.code != 0 and "there is no exact adapter, because PEFT " in refused.err
    assert not (tmp_path / "lora").exists()
