"""gauss-newton looks at rows in llama.cpp: it finds what a look in torch finds, and torch holds nothing of the file."""

import json
from dataclasses import replace

import pytest
import torch
from architectures import makes_models, shapes, values, write_model
from folders import bpe_tokenizer, completion_rows, label_rows, refused, tezo, train, write_rows
from gguf_files import tiny_llama, write_gguf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tezo.engines.llama_cpp import engine as llama_engine
from tezo.engines.llama_cpp.engine import LlamaCpp
from tezo.forward.engine import changes_of
from tezo.models.gguf import GgufWeights
from tezo.training.job import prepare
from tezo.training.loop import train as run_config
from tezo.training.settings import parse_config

pytestmark = pytest.mark.engine
written = pytest.mark.skipif(not makes_models(), reason="this llama.cpp does not make the tensors of a model")
ROWS = {"labels": label_rows, "texts": completion_rows}


def config(model, data, **changes):
    method = {"name": "gauss-newton", "rank": 4, "num_directions": 8}
    made = parse_config({"model": {"name": str(model), "engine": "llama.cpp"}, "data": {"train": str(data)},
                         "method": method, "train": {"steps": 2, "batch_size": 24}})  # fmt: skip
    return replace(made, train=replace(made.train, **changes))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root, tokenizer = tmp_path_factory.mktemp("home"), bpe_tokenizer(chat=True)
    write_gguf(root / "tiny.gguf", tiny_llama(len(tokenizer)), tokenizer)
    for name, make in ROWS.items():
        write_rows(root / f"{name}.jsonl", make(64))
    return root


@pytest.mark.parametrize("rows", ROWS)
def test_directions_that_a_look_finds_in_the_engine_are_torchs(home, rows):
    made, looks = config(home / "tiny.gguf", home / f"{rows}.jsonl"), []
    for engine in ("llama.cpp", "torch"):
        job = prepare(replace(made, model=replace(made.model, engine=engine)), measuring=False)
        job.optimizer.refresh()
        looks.append(job.optimizer.basis.at(0))
        job.optimizer.close()
    mine, theirs = looks
    assert mine.outputs and mine.outputs.keys() == theirs.outputs.keys()
    assert rows == "labels" or mine.passes == theirs.passes  # an engine has labelled rows in other parts
    for name, u_OR in mine.outputs.items():
        found, expected = u_OR @ mine.inputs[name].T, theirs.outputs[name] @ theirs.inputs[name].T
        assert expected.norm() > 0
        assert (found - expected).norm() <= 1e-3 * expected.norm(), name
    if rows == "labels":
        assert mine.signals == pytest.approx(theirs.signals, abs=1e-3)
        changes = [look.columns.changes_2ER for look in looks]
        assert (changes[0] - changes[1]).norm() <= 1e-3 * changes[1].norm()


@torch.no_grad()
def test_layers_outside_of_a_pass_have_the_trained_change(home):
    """By an engine, which knows the stored weights alone, as by torch; and their derivatives."""
    job = prepare(config(home / "tiny.gguf", home / "texts.jsonl"), measuring=False)
    closure = job.objective.closure(job.model, job.batches(range(24)))
    job.optimizer.step(closure)
    change = {name: pair for name, pair in changes_of(job.model, 1)[0].items() if all(own.any() for own in pair)}
    name, (a_RI, b_OR) = next(iter(change.items()))
    module, draw = job.model.get_submodule(name), torch.Generator().manual_seed(0)
    x_PI = torch.randn(5, a_RI.shape[1], generator=draw).requires_grad_()
    g_PO = torch.randn(5, b_OR.shape[0], generator=draw)
    wanted_PO = module(x_PI.detach()).float()  # torch reads the weight, which has the change beside it
    in_torch = job.objective.evaluator.in_torch().layer_function(job.model, name, a_RI.shape[1], x_PI[:0])
    found_PO = closure.layer_function(job.model, name, a_RI.shape[1], x_PI[:0])(x_PI)
    assert (found_PO - wanted_PO).norm() < 1e-3 * (x_PI @ a_RI.T @ b_OR.T).norm()
    with torch.enable_grad():
        grads = [
            torch.autograd.grad(layer(x_PI), x_PI, g_PO)[0]
            for layer in (closure.layer_function(job.model, name, a_RI.shape[1], x_PI[:0]), in_torch)
        ]
    assert (grads[0] - grads[1]).norm() < 1e-3 * (g_PO @ b_OR @ a_RI).norm() > 0
    job.optimizer.close()


@pytest.mark.slow
def test_torch_looks_where_an_engine_does_not_show_layers(home, tmp_path, monkeypatch):
    made, summaries = config(home / "tiny.gguf", home / "labels.jsonl"), []
    for shows in (True, False):
        if not shows:
            monkeypatch.setattr(LlamaCpp, "watches", lambda *_: False)
            monkeypatch.delattr(LlamaCpp, "watch")
        summaries.append(run_config(made, tmp_path / f"{shows}"))
    fell = [own["before"]["loss"] - own["after"]["loss"] for own in summaries]
    assert fell[0] > 1e-3 and fell[0] == pytest.approx(fell[1], rel=0.02)


class Seen(TorchDispatchMode):
    """Looks at all tensors with values that torch computes or makes: how large they are, and which are weights."""

    def __init__(self, weights):
        super().__init__()
        self._weights = {name: own / own.norm() for name, own in weights.items()}
        self.largest, self.found = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            made = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    self.largest = max(self.largest, tensor.numel())
                    self.found |= {name for name, own in self._weights.items() if is_like(tensor, own)}
        return made


def is_like(tensor, weight):
    """Whether a tensor is a weight, transposed or not, but for the rounding of its type."""
    if tensor.ndim != 2 or sorted(tensor.shape) != sorted(weight.shape):
        return False
    turns = [own for own in (tensor, tensor.T) if own.shape == weight.shape]
    return any(float((own.float() * weight).sum()) > 0.9 * float(own.float().norm()) > 0 for own in turns)


@written
@pytest.mark.parametrize("rows", ROWS)
def test_torch_has_no_weight_and_nothing_of_the_size_of_the_file(rows, tmp_path, monkeypatch):
    def read(self, name):
        raise AssertionError(f"{name} was read for torch")

    monkeypatch.setattr(GgufWeights, "__getitem__", read)
    monkeypatch.setattr(llama_engine, "UNPACKED_AT_ONCE", 1 << 12)  # as 16 MB are to the matrices of a large file
    model = write_model(tmp_path / "model.gguf", "gemma3", "Q4_K_M")
    data = write_rows(tmp_path / "rows.jsonl", ROWS[rows](40))
    matrices = {name: own for name, own in shapes("gemma3").items() if len(own) == 2}
    weights = {name: torch.from_numpy(values("gemma3", name, own)) for name, own in matrices.items()}
    with Seen(weights) as torch_has:
        summary = run_config(config(model, data), tmp_path / "run")
    assert summary["after"]["loss"] < summary["before"]["loss"]
    # free text reads rows of the head, which are all here
    assert torch_has.found <= ({"token_embd.weight"} if rows == "texts" else set())
    assert 0 < torch_has.largest < sum(own.numel() for own in weights.values()) / 4
    with Seen(weights) as torch_has:
        _ = weights["blk.0.attn_v.weight"].T.contiguous()
    assert torch_has.found == {"blk.0.attn_v.weight"}


@written
@pytest.mark.parametrize(
    ("architecture", "kind", "rows"),
    [("gemma3", "Q4_K_M", "labels"), ("mamba2", "F32", "texts"),
     *(pytest.param(*own, marks=pytest.mark.slow) for own in
       [("gpt2", "F32", "texts"), ("qwen3moe", "Q5_0", "labels"), ("falcon-h1", "Q8_0", "labels")])],
)  # fmt: skip
def test_gauss_newton_tunes_a_file_that_no_trainer_reads(architecture, kind, rows, tmp_path):
    model = write_model(tmp_path / "model.gguf", architecture, kind)
    data, run = write_rows(tmp_path / "rows.jsonl", ROWS[rows](24)), tmp_path / "run"
    done = train(
        model,
        data,
        run,
        "--engine",
        "llama.cpp",
        "--method",
        "gauss-newton",
        data__dev=data,
        method__lr=None,
        train__batch_size=None,
    )
    assert done.code == 0, done.err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["dev_loss"] < summary["dev_loss_before"] - 0.02
    measured = json.loads(tezo("eval", run, "--data", data, "--json").out)["loss"]
    assert measured == pytest.approx(summary["dev_loss"], abs=1e-4 if kind == "F32" else 0.02)


@written
def test_a_basis_that_needs_torch_is_refused_with_a_way_out(tmp_path):
    model, data = write_model(tmp_path / "model.gguf", "gemma3"), write_rows(tmp_path / "rows.jsonl", label_rows(16))
    ask = ("--engine", "llama.cpp", "--method", "head-feedback")
    done = train(model, data, tmp_path / "run", *ask)
    refused(done, "method.basis=gaussian", "leave method.name out", "llama.cpp alone")
    assert not (tmp_path / "run").exists()
    assert train(model, data, tmp_path / "run", *ask, method__basis="gaussian", steps=1).code == 0
