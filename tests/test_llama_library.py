"""llama.cpp's shared library is found and bound, whatever release it is of, or refused in a sentence."""

import ctypes
import ctypes.util
import gc
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tezo.engines.llama_cpp import library as libraries
from tezo.engines.llama_cpp.layouts import ContextFields, LayoutError, ModelFields, ReadParameters
from tezo.engines.llama_cpp.library import Library, find_library, load_library
from tezo.system.errors import RequestError

engine = pytest.mark.engine

# (field, type as `struct` has it, default value), as releases of 2026 have them; None: not in all of them
CONTEXT = [
    ("n_ctx", "I", 512), ("n_batch", "I", 2048), ("n_ubatch", "I", 512), ("n_seq_max", "I", 1),
    ("n_rs_seq", "I", None), ("n_outputs_max", "I", None), ("n_outputs_max_per_seq", "I", None),
    ("n_threads", "i", 4), ("n_threads_batch", "i", 4), ("ctx_type", "i", None),
    ("rope_scaling_type", "i", -1), ("pooling_type", "i", -1), ("attention_type", "i", -1),
    ("flash_attn_type", "i", -1), ("rope_freq_base", "f", 0.0), ("rope_freq_scale", "f", 0.0),
    ("yarn_ext_factor", "f", -1.0), ("yarn_attn_factor", "f", -1.0), ("yarn_beta_fast", "f", -1.0),
    ("yarn_beta_slow", "f", -1.0),
    ("yarn_orig_ctx", "I", 0), ("defrag_thold", "f", -1.0), ("cb_eval", "P", 0), ("cb_eval_user_data", "P", 0),
    ("type_k", "i", 1), ("type_v", "i", 1), ("moe_cache_size", "N", None), ("abort_callback", "P", 0),
    ("abort_callback_data", "P", 0), ("embeddings", "?", False), ("offload_kqv", "?", True), ("no_perf", "?", True),
    ("op_offload", "?", True), ("swa_full", "?", True), ("kv_unified", "?", False), ("samplers", "P", 0),
    ("n_samplers", "N", 0), ("ctx_other", "P", None),
]  # fmt: skip
RELEASES = {
    "2026-04": set(),
    "2026-06": {"n_rs_seq", "n_outputs_max", "ctx_type", "ctx_other"},
    "2026-08": {"n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq", "ctx_type", "ctx_other"},
    "2026-11": {"n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq", "ctx_type", "ctx_other", "moe_cache_size"},
}
DEFAULTS = {"n_outputs_max_per_seq": 1}


def packed(fields, rest=b""):
    """(bytes of a structure with these default values and with `rest` behind it, place of each field)."""
    format_, values, places = "@", [], {}
    for name, kind, value in fields:
        places[name] = struct.calcsize(format_ + "0" + kind)
        format_ += kind
        values.append(DEFAULTS.get(name, 0) if value is None else value)
    data = struct.pack(format_, *values)
    return (data + rest).ljust(512, b"\x7f")[:512], places


@pytest.mark.parametrize("release", RELEASES)
@given(rest=st.binary(max_size=300))
def test_fields_are_found_by_the_default_values_of_each_release(release, rest):
    fields = [field for field in CONTEXT if field[2] is not None or field[0] in RELEASES[release]]
    data, places = packed(fields, rest)
    found = ContextFields.of(data)
    assert found.sizes == tuple(places[name] for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"))
    assert found.threads == (places["n_threads"], places["n_threads_batch"])
    assert found.types == (places["type_k"], places["type_v"])
    assert (found.flash_attention, found.callback, found.unified) == tuple(
        places[name] for name in ("flash_attn_type", "cb_eval", "kv_unified")
    )


@pytest.mark.parametrize("name", [name for name, _, value in CONTEXT if value is not None][:-2])
def test_a_field_that_is_gone_or_has_another_default_is_an_error(name):
    gone = [field for field in CONTEXT if field[0] != name]
    other = [
        (own, kind, {"?": not value, "f": 2.0}.get(kind, 7)) if own == name else (own, kind, value)
        for own, kind, value in CONTEXT
    ]
    # zeros stand in the place of these; contexts show whether kv_unified was heard
    unseen = ("embeddings", "abort_callback_data", "abort_callback", "kv_unified")
    for fields in [other] if name in unseen else [gone, other]:
        with pytest.raises(LayoutError):
            ContextFields.of(packed(fields)[0])


@pytest.mark.parametrize(
    ("numbers", "flags", "first"),
    [
        ((999, 1, 0), (False, True, False, False, True), 64),  # vocab_only, use_mmap, use_mlock, ...
        ((-1, 1, 0), (False, True, False, False, False, True, False, False), 64),
        ((-1, 1, -1, 1, 0), (False, False, True, False, False, False), 72),  # vocab_only, check_tensors, ...
    ],
)
def test_the_field_of_models_is_found_in_each_release(numbers, flags, first):
    data = struct.pack(f"@PP{len(numbers)}i4P{len(flags)}?", 0, 0, *numbers, 0, 0, 0, 0, *flags).ljust(512, b"\x7f")
    assert ModelFields.of(data).vocabulary_only == first
    for place in (0, 8, 16, first - 8, first):
        broken = bytearray(data)
        broken[place] = 3 if place != first else 1
        with pytest.raises(LayoutError):
            ModelFields.of(bytes(broken))


@engine
def test_the_library_is_bound_and_what_is_wrong_with_its_structures_names_it(monkeypatch):
    lib = load_library()
    assert lib.name and lib.tensor.sizes > lib.tensor.kind
    place = find_library()
    assert place is not None and Library(place).context == lib.context

    def shifted(defaults):
        return ContextFields.of(b"\0\0\0\0" + defaults[:-4])

    monkeypatch.setattr(libraries, "ContextFields", type("Fields", (), {"of": staticmethod(shifted)}))
    with pytest.raises(
        RequestError, match=r"structures of .* are not those .*llama_context_params begins with"
    ) as error:
        Library(place)
    assert lib.name in str(error.value) and "TEZO_LLAMA_CPP=PATH" in str(error.value)


@engine
def test_a_variable_names_any_libllama_and_comes_first(monkeypatch, tmp_path):
    place = find_library()
    assert place is not None
    link = tmp_path / "libllama.so"
    link.symlink_to(place.path)
    monkeypatch.setenv("TEZO_LLAMA_CPP", str(link))
    found = find_library()
    assert found is not None and found.path == link
    assert Library(found).tensor == load_library().tensor


def test_no_library_and_others_than_llama_cpp_are_one_sentence(monkeypatch, tmp_path):
    monkeypatch.delenv("TEZO_LLAMA_CPP", raising=False)
    monkeypatch.setattr(libraries, "find_spec", lambda _: None)
    assert find_library() is None
    monkeypatch.setattr(libraries, "load_library", load_library.__wrapped__)
    with pytest.raises(RequestError, match=r"model.engine is llama.cpp, .*pip install 'tezo\[llama-cpp\]'"):
        libraries.load_library()
    monkeypatch.setenv("TEZO_LLAMA_CPP", str(tmp_path))
    with pytest.raises(RequestError, match=r"TEZO_LLAMA_CPP is .*, which is not a file"):
        libraries.load_library()
    text = tmp_path / "libllama.so"
    text.write_text("no library")
    monkeypatch.setenv("TEZO_LLAMA_CPP", str(text))
    with pytest.raises(RequestError, match=r"libllama.so does not load here"):
        libraries.load_library()
    name = ctypes.util.find_library("m")
    others = [Path(folder) / str(name) for folder in ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/usr/lib")]
    if other := next((path for path in others if path.is_file()), None):
        assert math.isclose(ctypes.CDLL(str(other)).abs(-1), 1)
        monkeypatch.setenv("TEZO_LLAMA_CPP", str(other))
        with pytest.raises(RequestError, match=r"lacks llama_backend_init, .* and others; install a newer one"):
            libraries.load_library()


@engine
def test_errors_are_heard_after_another_library_of_the_same_file_is_gone(tmp_path):
    place, lib = find_library(), load_library()
    assert place is not None
    Library(place)
    gc.collect()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, and nothing of it")
    lib.errors()
    assert not lib.gguf_init_from_file(str(broken).encode(), ReadParameters(True, None))
    assert lib.errors() and not lib.errors()
