"""Files of each architecture and type: tuned by the default for a round, saved, exported and read back by llama.cpp.

docs/any-file.md has what these trials found; `benchmarks/any_file.py` repeats them for its table.
"""

import pytest
from architectures import ARCHITECTURES, TYPES, makes_models
from file_trials import LARGE, OVERFLOWS, REFUSED, holds, tried

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not makes_models(), reason="this llama.cpp does not make the tensors of a model"),
]
DIAGONAL = {("qwen3", "F32"), ("gpt2", "BF16"), ("qwen3moe", "Q8_0"), ("gemma3", "Q5_0"), ("phi3", "Q4_K_M"),
            ("stablelm", "F16"), ("olmo2", "Q6_K"), ("granite", "IQ4_NL")}  # fmt: skip
"""Each type once, in an architecture of its own."""
FAST = {("qwen3moe", "Q8_0"), ("phi3", "Q4_K_M")}
"""Of these, what the fast tests have."""
ALL_TYPES = ("qwen3moe", "gemma3")
"""Architectures that are tried in every type; the others in the commonest mix. The table has all."""
EVERY = [
    (architecture, kind)
    for architecture in ARCHITECTURES
    for kind in TYPES
    if (architecture, kind) in DIAGONAL | OVERFLOWS
    or (architecture not in LARGE and (kind == "Q4_K_M" or architecture in ALL_TYPES))
]


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [pytest.param(*own, marks=() if own in FAST else pytest.mark.slow) for own in EVERY],
)
def test_a_file_is_tuned_saved_exported_and_read_back(architecture, kind, tmp_path):
    found = tried(architecture, kind, "llama.cpp", tmp_path)
    if (architecture, kind) in OVERFLOWS:
        assert "nan" in found[REFUSED]
        return
    assert holds(found, kind), found
    assert found["layers"] > 0
    assert any("mixture" in notice for notice in found["notices"]) == ("expert_count" in ARCHITECTURES[architecture])


@pytest.mark.parametrize("kind", [pytest.param(own, marks=() if own == "Q5_0" else pytest.mark.slow) for own in TYPES])
@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.slow), "qwen2"])
def test_so_it_is_in_torch(architecture, kind, tmp_path):
    found = tried(architecture, kind, "torch", tmp_path)
    assert REFUSED not in found and holds(found, kind), found
