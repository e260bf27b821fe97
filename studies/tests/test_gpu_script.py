"""`benchmarks/gpu.py`, rehearsed without a GPU: every kind of case, cuts, cases that fail, the table drawn from it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import forked
from tezo_studies.bench.cases import make_case
from tezo_studies.bench.packed_model import packed
from tezo_studies.bench.settings import GRADIENTS, Settings
from tezo_studies.bench.shapes import SHAPES, from_shape
from tezo_studies.bench.single_case import measure_case
from tezo_studies.bench.workload import Work

from tezo.models.quantization import quantization_config
from tezo.system.errors import RequestError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
WORK = Settings(model="tiny", batch=2, length="8", rank=4, rounds=3)


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "docs")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("gpu", "gpu_tables", "drawing")})


@pytest.fixture
def rehearse(scripts, monkeypatch, tmp_path):
    """Runs the script in this process, and the processes that it starts by `start`; gives the file's content."""
    path = tmp_path / "gpu.json"

    def run(start, *more, shapes="tiny"):
        line = ["gpu.py", "--device", "cpu", "--shapes", shapes, "--batch", 2, "--length", 8, "--rank", 4, *more]
        monkeypatch.setattr(sys, "argv", [*map(str, line), "--json", str(path)])
        own = SimpleNamespace(run=start, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(scripts.gpu, "subprocess", own)
        scripts.gpu.main()
        return json.loads(path.read_text(encoding="utf-8"))

    return run


def in_a_fork(line, *, stderr, **_):
    done = forked(*line[1:])
    stderr.write(done.stderr)
    return done


def here(scripts):
    """A start of the script's processes in this one: what they raise ends them as it would a process."""

    def start(line, *, stderr, **_):
        before, sys.argv, code = sys.argv, line[1:], 0
        try:
            scripts.gpu.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            stderr.write("" if isinstance(stop.code, int) else str(stop.code))
        finally:
            sys.argv = before
        return SimpleNamespace(returncode=code)

    return start


def names(scripts, *kinds):
    dtype = {kind: "float16" if kind == "paper" else "bfloat16" for kind in kinds}
    return [f"tiny/{dtype[kind]}/{kind}/{label}" for kind in kinds for label in scripts.gpu.LABELS[kind]]


FEW = {
    "targets": ("J2", "tezo", "per-example:head-feedback", "mezo"),
    "round": ("gauss-newton",),
    "paper": ("zero-shot", "lozo"),
    "none": ("lora-checkpointed",),
    "nf4": ("F", "per-example:tezo", "lora-checkpointed"),
    "graphs": ("plain-closure:tezo", "cuda-graphs:F2", "cuda-graphs:tezo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FEW, None], ids=["few", "all"])
def test_the_rehearsal_has_every_case_with_numbers_or_a_reason(scripts, rehearse, tmp_path, monkeypatch, cases):
    pytest.importorskip("bitsandbytes", reason="packs models in nf4")
    pytest.importorskip("peft", reason="LoRA is an adapter of PEFT")
    if cases is not None:
        monkeypatch.setattr(scripts.gpu, "LABELS", cases)
    found = rehearse(here(scripts) if cases else in_a_fork)
    assert list(found["cases"]) == names(scripts, *scripts.gpu.LABELS)
    for name, result in found["cases"].items():
        if "cuda-graphs" in name or "captured" in name:
            assert result == {"reason": "CUDA graphs need a GPU, and the device is cpu."}
        elif "kernel" in name:
            assert result == {"reason": "kernel:mezo needs a GPU and the package triton."}
        else:
            assert min(result["seconds"]["median"], result["to_F2"], result["tokens_per_second"]) > 0, name
            assert result["peak"] > 1 << 20 and result["rounds"] >= 3 and result["operations"] > 0
            compared = scripts.gpu.compared_with(name.split("/")[3]) if "/targets/" in name else ()
            assert list(result["beside"]) == list(compared)
    assert {"hardware", "memory", "driver_cuda", "torch_cuda"} <= found.keys()
    assert found["versions"]["torch"] == torch.__version__
    monkeypatch.setattr(scripts.drawing, "RESULTS", tmp_path)
    table = scripts.gpu_tables.GPU_TABLES["gpu"]()
    ratios = [f"{found['cases'][f'tiny/bfloat16/{kind}/lora-checkpointed']['to_F2']:.2f}" for kind in ("none", "nf4")]
    assert (
        f"| LoRA, checkpointed | {ratios[0]} | - |" in table and f"| QLoRA, checkpointed | - | {ratios[1]} |" in table
    )
    assert "- tiny bf16, cuda-graphs:F2: not measured (CUDA graphs need a GPU" in table


def test_parts_with_targets_and_those_of_the_paper_are_rehearsed_quickly(scripts, rehearse, monkeypatch):
    quick = {"targets": ("tezo-adam", "per-example:tezo", "mezo"), "round": ("gauss-newton",), "paper": ("lozo",)}
    monkeypatch.setattr(scripts.gpu, "LABELS", quick)
    monkeypatch.setattr(scripts.gpu, "CASE_SECONDS", 0.01)
    found = rehearse(here(scripts))["cases"]
    assert list(found) == names(scripts, *quick)
    assert not any("reason" in case for case in found.values())
    ratios = {label: found[f"tiny/bfloat16/targets/{label}"]["beside"] for label in quick["targets"]}
    assert [list(beside) for beside in ratios.values()] == [["J2"], ["tezo"], ["published:mezo"]]
    assert all(case["to"] > 0 for beside in ratios.values() for case in beside.values())
    done = found["tiny/bfloat16/round/gauss-newton"]
    assert (done["rows"], done["passes"] >= 4, done["look_passes"] >= 1) == (16, True, True)
    assert 0 < done["look_seconds"] < done["round_seconds"]
    assert found["tiny/float16/paper/lozo"]["trained"] > found["tiny/bfloat16/targets/mezo"]["trained"], "vectors too"


def test_tables_of_targets_and_of_the_paper_have_what_was_measured_beside_its_limit(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts.drawing, "RESULTS", tmp_path)
    head = {"batch": 16, "length": "rte", "rank": 32, "command": "gpu.py", "torch_cuda": "13.0", "driver_cuda": "13.0"}
    head |= {"memory": 2**37, "hardware": "GPU", "versions": {"torch": "2", "transformers": "5"}}
    ms = lambda median: {"seconds": {"median": median / 1000}, "peak": 2**30, "reserved": 3 * 2**29}  # noqa: E731
    before = {"none/J2": ms(100), "none/tezo": ms(150)}
    now = {"targets/tezo": ms(1) | {"beside": {"J2": {"to": 1.07}}, "kernels": 7}, "targets/J2": ms(1) | {"beside": {}}}
    now |= {"paper/lozo": ms(195.5), "paper/mezo-adam": {"reason": "CUDA out of memory."}}
    for name, cases in (("gpu_before", before), ("gpu", now)):
        of_model = {
            f"llama-7b/{'float16' if 'paper' in key else 'bfloat16'}/{key}": case for key, case in cases.items()
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(head | {"cases": of_model}), encoding="utf-8")
    drawn = {
        name: table() for name, table in scripts.gpu_tables.GPU_TABLES.items() if name not in ("gpu", "gpu-launches")
    }
    assert "| tezo / J2 | 1.10 | 1.50 | 1.07 | 1.25 | - | - |" in drawn["gpu-targets"]
    assert "| tezo | 1.00 | 1.00 | - | - |" in drawn["gpu-targets"]
    assert "| LOZO | 1.50 (13.44) |" in drawn["paper-memory"] and "| MeZO | - (13.91) |" in drawn["paper-memory"]
    assert "| LOZO | 195.5 (195) |" in drawn["paper-time"]
    assert "| MeZO-Adam | does not fit (39.5) |" in drawn["paper-memory"]
    assert "Not measured" in drawn["gpu-rounds"]


def test_without_a_file_the_table_says_how_to_measure(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts.drawing, "RESULTS", tmp_path)
    said = scripts.gpu_tables.GPU_TABLES["gpu"]()
    assert "Not measured" in said and "python benchmarks/gpu.py" in said


NUMBERS = {"seconds": {"median": 1.0}, "to_F2": 1.0, "peak": 1, "tokens_per_second": 1.0}


def fake(monkeypatch, scripts, of_label):
    """Cases that take no time; `of_label` may raise. Gives the labels in the order in which they were measured."""
    asked = []

    def case(label, *base):
        asked.append(label)
        of_label(label)
        return NUMBERS

    monkeypatch.setattr(scripts.gpu, "measure_case", case)
    monkeypatch.setattr(scripts.gpu.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    return asked


@pytest.mark.parametrize(
    ("error", "reason", "processes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory", 1),
        (RequestError("it does not fit"), "it does not fit", 1),
        (RuntimeError("CUDA error: unspecified launch failure"), "RuntimeError: CUDA error: unspecified launch", 2),
        (SystemExit(9), "its process ended with 9", 2),
    ],
)
def test_a_case_that_fails_loses_no_other(scripts, rehearse, monkeypatch, error, reason, processes):
    def fails(label):
        if label == "lora":
            raise error

    asked, started, start = fake(monkeypatch, scripts, fails), [], here(scripts)
    monkeypatch.setattr(scripts.gpu, "LABELS", {"none": ("F", "lora", "tezo")})
    found = rehearse(lambda *a, **k: started.append(1) or start(*a, **k))["cases"]
    assert asked == ["F", "lora", "tezo"] and len(started) == processes
    lost = found.pop("tiny/bfloat16/none/lora")
    assert reason in lost["reason"] and "begun" not in lost
    assert [result["to_F2"] for result in found.values()] == [1.0, 1.0]


DYING = """
import os, signal, sys, time
sys.path.insert(0, {benchmarks!r})
import gpu

def main():
    gpu.TIME_LIMIT, gpu.LABELS = 3, {labels}
    gpu.measure_case = case
    gpu.main()

def case(label, *base):
    if label == "lora":
        {fate}
    return {result}
"""


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended with -9"),
        pytest.param("time.sleep(60)", "it took more than 100 s", marks=pytest.mark.slow),
    ],
)
def test_a_case_in_which_its_process_ends_loses_no_other(scripts, rehearse, monkeypatch, tmp_path, fate, reason):
    labels = {"none": ("F", "lora", "tezo")}
    monkeypatch.setattr(scripts.gpu, "LABELS", labels)
    parts = {"benchmarks": str(ROOT / "benchmarks"), "labels": labels, "fate": fate, "result": NUMBERS}
    script = tmp_path / "dying.py"
    script.write_text(DYING.format(**parts), encoding="utf-8")
    found = rehearse(lambda line, **how: in_a_fork([line[0], str(script), *line[2:]], **how))["cases"]
    assert reason in found.pop("tiny/bfloat16/none/lora")["reason"]
    assert list(found.values()) == [NUMBERS | {"commit": result["commit"]} for result in found.values()]


def test_after_a_cut_it_goes_on_with_the_case_that_was_cut(scripts, rehearse, monkeypatch):
    def cut(label):
        if label == "lora" and len(asked) == 2:
            raise KeyboardInterrupt

    asked = fake(monkeypatch, scripts, cut)
    monkeypatch.setattr(scripts.gpu, "LABELS", {"none": ("F", "lora", "tezo")})
    with pytest.raises(KeyboardInterrupt):
        rehearse(here(scripts))
    found = rehearse(here(scripts))
    assert asked == ["F", "lora", "lora", "tezo"] and len(found["cases"]) == 3
    assert not any("reason" in result for result in found["cases"].values())
    rehearse(here(scripts))
    assert len(asked) == 4, "nothing is measured twice"


def test_no_case_begins_when_no_time_is_left(scripts, rehearse, monkeypatch, capsys):
    clock = iter(range(1000))
    monkeypatch.setattr(scripts.gpu, "time", SimpleNamespace(time=lambda: next(clock)))
    asked = fake(monkeypatch, scripts, lambda _: None)
    found = rehearse(here(scripts), "--seconds", 8)
    assert 0 < len(asked) == len(found["cases"]) < 8
    left = len(names(scripts, *scripts.gpu.LABELS)) - len(asked)
    assert f"{left} cases are left; the same command goes on." in capsys.readouterr().out


def test_a_file_of_another_machine_or_setting_is_not_mixed_with_this(scripts, rehearse, monkeypatch):
    fake(monkeypatch, scripts, lambda _: None)
    monkeypatch.setattr(scripts.gpu, "LABELS", {"none": ("F",)})
    rehearse(here(scripts))
    with pytest.raises(SystemExit, match=r"has rank 4, not 8; give another --json"):
        rehearse(here(scripts), "--rank", 8, shapes="tiny,tiny-llama")
    monkeypatch.setattr(scripts.gpu, "cpu", lambda: "another processor")
    with pytest.raises(SystemExit, match="has hardware"):
        rehearse(here(scripts), shapes="tiny,tiny-llama")


def test_a_cut_case_is_no_reason_for_another_machine(scripts, rehearse, monkeypatch):
    def cut(label):
        if label == "lora":
            raise KeyboardInterrupt

    asked = fake(monkeypatch, scripts, cut)
    monkeypatch.setattr(scripts.gpu, "LABELS", {"none": ("F", "lora")})
    with pytest.raises(KeyboardInterrupt):
        rehearse(here(scripts))
    with pytest.raises(SystemExit, match="has rank 4"):
        rehearse(here(scripts), "--rank", 8)
    with pytest.raises(KeyboardInterrupt):
        rehearse(here(scripts))
    assert asked == ["F", "lora", "lora"]


@pytest.mark.parametrize(("number", "text"), [(12080, "12.8"), (13000, "13.0")])
def test_the_cuda_of_the_driver_is_asked_for(scripts, monkeypatch, number, text):
    def ask(pointer):
        pointer._obj.value = number
        return 0

    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(cuDriverGetVersion=ask))
    assert scripts.gpu.driver_cuda() == text


def test_without_a_driver_there_is_no_cuda(scripts, monkeypatch):
    def load(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", load)
    assert scripts.gpu.driver_cuda() is None


def test_the_plan_names_shapes_and_its_first_parts_are_the_most_telling(scripts):
    first = [("llama-7b", "targets"), ("opt-1.3b", "targets"), ("llama-7b", "round"), ("llama-7b", "paper")]
    assert list(scripts.gpu.PLAN[:4]) == first and len(set(scripts.gpu.PLAN)) == len(scripts.gpu.PLAN)
    assert {shape for shape, _ in scripts.gpu.PLAN} <= SHAPES.keys()
    assert {kind for _, kind in scripts.gpu.PLAN} == scripts.gpu.LABELS.keys()


def test_a_shape_that_is_not_known_is_refused(rehearse, capsys):
    with pytest.raises(SystemExit):
        rehearse(None, shapes="tiny,opt-125")
    assert "Did you mean 'opt-125m'" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_gpu_it_says_how_to_rehearse():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, ROOT / "benchmarks/gpu.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--device cpu --shapes tiny" in done.stderr


@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
def test_packed_in_memory_is_packed_as_from_pretrained_does(shape, tmp_path):
    pytest.importorskip("bitsandbytes", reason="packs models in nf4")
    model = from_shape(SHAPES[shape].make(), torch.bfloat16, CPU)
    model.save_pretrained(tmp_path)
    kind, config = type(model), model.config
    options, _ = quantization_config("nf4", torch.bfloat16, CPU, lambda: kind(config))
    loaded = kind.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=options, device_map={"": CPU})
    expected, ours = dict(loaded.named_parameters()), dict(packed(model).named_parameters())
    assert expected.keys() == ours.keys()
    for name, weight in expected.items():
        assert type(ours[name]) is type(weight) and torch.equal(ours[name].data, weight.data), name
        state = getattr(weight, "quant_state", None)
        assert state is None or torch.equal(ours[name].quant_state.absmax, state.absmax)


@pytest.mark.parametrize("label", GRADIENTS)
def test_lora_leaves_the_shared_base_as_it_was(label):
    pytest.importorskip("peft", reason="LoRA is an adapter of PEFT")
    work = Work(WORK)
    before = {name: weight.detach().clone() for name, weight in work.model.named_parameters()}
    found = measure_case(label, work, make_case("F2", work))
    assert all(torch.equal(weight, before[name]) for name, weight in work.model.named_parameters())
    assert all(weight.requires_grad for weight in work.model.parameters())
    assert found["trained"] > 0 and found["held"] >= 3 * 4 * found["trained"], "the adapter and two moments"


def test_a_checkpointed_step_is_the_same_step_with_a_second_forward_pass():
    pytest.importorskip("peft", reason="LoRA is an adapter of PEFT")
    losses, calls = [], []
    for label in GRADIENTS:
        case = make_case(label, Work(WORK))
        layer = case._optimizer.model.get_submodule("base_model.model.model.decoder.layers.0.fc1")
        layer.register_forward_hook(lambda *_, label=label: calls.append(label))
        losses.append([case._optimizer.step(case._closure) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][0] != losses[0][2]
    assert [calls.count(label) for label in ("lora", "lora-checkpointed")] == [3, 6]


def test_a_twin_of_a_packed_model_has_no_scales_of_its_own():
    pytest.importorskip("bitsandbytes", reason="packs models in nf4")
    work = Work(WORK)
    work.model = packed(work.model)
    for name, module in work.twin().named_modules():
        if hasattr(module, "quant_state"):
            assert module.quant_state is work.model.get_submodule(name).quant_state


def test_cuda_graphs_without_a_gpu_are_refused_in_words():
    with pytest.raises(RequestError, match="CUDA graphs need a GPU"):
        make_case("cuda-graphs:tezo", Work(WORK))


class LikeGpu(str):
    """A device by name that takes itself for a GPU."""

    type = "cuda"


@pytest.mark.slow
def test_what_was_compiled_without_hooks_is_not_taken_for_a_model_with_them(monkeypatch):
    compiled, work = torch.compile, Work(WORK)
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled(model, backend="eager"))
    work.device = LikeGpu("cpu")
    make_case("cuda-graphs:F2", work).run()
    case = make_case("cuda-graphs:tezo", work)
    for _ in range(3):
        case.run()
    case.close()
    torch.compiler.reset()
