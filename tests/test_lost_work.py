"""Work that is not lost: interrupted runs, runs in other folders, models that are free again."""

import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from folders import label_rows, model_folder, refused, tiny_model, tokenizer_for, write_rows
from folders import tezo as command_line
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import tezo
from tezo.models.loading import load_model
from tezo.system.errors import NonFiniteLossError, NonFiniteModelError, RequestError, RunError, RunInterrupted
from tezo.tasks.row_sources import read_rows
from tezo.training.listeners import Listener

ROWS = {"data": label_rows(20), "dev": label_rows(8, seed=1)}
SETTINGS = {"method": "head-feedback", "steps": 4, "batch_size": 4, "lr": 0.05, "rank": 4, "eval_every": 2}

pytestmark = pytest.mark.disk


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where temporary run folders go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def unfinished(run):
    """Takes from a run what it has at its end alone."""
    for name in ("summary.json", "manifest.json"):
        (run / name).unlink()


def in_memory(dtype=torch.float32):
    tokenizer = tokenizer_for("opt")
    return {"model": tiny_model("opt", len(tokenizer)).to(dtype), "tokenizer": tokenizer}


def trained(base=None, **changes):
    return tezo.train(**(base or in_memory()), **(ROWS | SETTINGS | changes))


def outputs(model):
    ids = torch.randint(5, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


class At(Listener):
    """Does something before a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def stepping(self, step):
        if step == self.step:
            self.act()


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def fail(error):
    raise error


# Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_without_output_is_kept_and_goes_on_to_the_bit(temporary, number):
    base = in_memory()
    untouched, whole = outputs(base["model"]), trained()
    with pytest.raises(KeyboardInterrupt) as caught:
        trained(base, listeners=[At(1, lambda: press(number))])
    stop = caught.value
    assert isinstance(stop, RunInterrupted) and not isinstance(stop, Exception) and stop.steps == 2
    assert stop.folder.parent == temporary and f"output={str(stop.folder)!r}, resume=True" in str(stop)
    assert "--resume" not in str(stop) and stop.exit_code == 128 + number
    assert torch.equal(outputs(base["model"]), untouched), "the model is as before"
    run = trained(base, output=stop.folder, resume=True)
    assert run.summary["after"] == whole.summary["after"]
    assert torch.equal(outputs(run.model), outputs(whole.model))


def test_a_second_interrupt_ends_at_once_and_keeps_the_steps(temporary):
    def twice():
        press()
        press()

    base = in_memory()
    with pytest.raises(KeyboardInterrupt) as caught:
        trained(base, listeners=[At(2, twice)])
    (folder,) = temporary.iterdir()
    assert str(folder) in caught.value.__notes__[0] and "resume=True" in caught.value.__notes__[0]
    assert trained(base, output=folder, resume=True).summary["after"] == trained().summary["after"]


@pytest.mark.parametrize(
    ("error", "kept"), [(RunError("the disk is full."), True), (RequestError("no."), False), (ValueError("own"), False)]
)
def test_a_failed_run_without_output_is_kept_where_it_can_go_on(temporary, error, kept):
    with pytest.raises(type(error)) as caught:
        trained(listeners=[At(2, lambda: fail(error))])
    assert len(list(temporary.iterdir())) == len(getattr(caught.value, "__notes__", [])) == int(kept)


@pytest.mark.parametrize("moment", ["search", "evaluation", "step"])
def test_a_model_is_free_after_an_interrupt_at_any_moment(monkeypatch, moment):
    base = in_memory()
    untouched = outputs(base["model"])
    place = {
        "search": "tezo.optim.learning_rate._Search.run",
        "evaluation": "tezo.training.evaluations.Evaluations.of",
        "step": "tezo.training.loop.Loop._log_step",
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(place, lambda *_, **__: fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            trained(base, lr="auto")
    assert torch.equal(outputs(base["model"]), untouched)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in base["model"].modules())
    assert trained(base).summary["after"] == trained().summary["after"]


# Models that are free again


def gone(base, way, tmp_path):
    """Tunes a model, and drops all that could take the change off; its outputs as tuned."""
    if way == "optimizer":
        optimizer = tezo.head_feedback(base["model"], lr=0.05, rank=4)
        for _ in range(3):
            optimizer.step(lambda: base["model"](input_ids=IDS, labels=IDS).loss)
    else:
        run = trained(base, output=tmp_path / "run")
        if way == "opened":
            run.close()
            run = tezo.open_run(tmp_path / "run", **base)
        assert run.model is base["model"]
    return outputs(base["model"])


IDS = torch.arange(5, 25).view(2, 10)


@pytest.mark.parametrize("way", ["trained", "opened", "optimizer"])
def test_a_model_whose_run_is_gone_stays_tuned_and_can_be_tuned_again(tmp_path, way):
    base = in_memory()
    untouched, tuned = outputs(base["model"]), gone(base, way, tmp_path)
    gc.collect()
    assert torch.equal(outputs(base["model"]), tuned) and not torch.equal(tuned, untouched)
    run = trained(base, lr=1e-12)
    assert any("that is gone" in notice for notice in run.summary["notices"])
    torch.testing.assert_close(outputs(run.model), tuned, rtol=0, atol=1e-5)
    run.close()
    torch.testing.assert_close(outputs(base["model"]), tuned, rtol=0, atol=1e-5)
    assert torch.equal(outputs(copy.deepcopy(base["model"])), outputs(base["model"]))


@pytest.mark.parametrize("way", ["trained", "opened"])
def test_a_model_whose_run_is_gone_is_the_base_where_the_run_is_opened_or_resumed(tmp_path, way):
    base = in_memory()
    tuned = gone(base, way, tmp_path)
    for run in (tezo.open_run(tmp_path / "run", **base), trained(base, output=tmp_path / "run", resume=True)):
        torch.testing.assert_close(outputs(run.model), tuned, rtol=0, atol=1e-5)
        run.close()


def test_a_model_that_is_in_use_is_still_refused(tmp_path):
    base = in_memory()
    run = trained(base)
    tuned = outputs(run.model)
    with pytest.raises(RequestError, match="tuned by another run"):
        trained(base)
    assert torch.equal(outputs(run.model), tuned)


def test_the_next_optimizer_on_a_model_goes_on_where_one_that_is_gone_ended(tmp_path):
    base = in_memory()
    tuned = gone(base, "optimizer", tmp_path)
    optimizer = tezo.head_feedback(base["model"], lr=0.05, rank=4)
    torch.testing.assert_close(outputs(base["model"]), tuned, rtol=0, atol=1e-5)
    optimizer.close()
    torch.testing.assert_close(outputs(base["model"]), tuned, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["head-feedback", "mezo", "adam"])
def test_a_model_that_peft_has_merged_is_tuned_as_one_that_was_loaded(tmp_path, method):
    model, options = in_memory()["model"], {"method": method, "keep_best": False}
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    merged = {"model": get_peft_model(model, config).merge_and_unload(), "tokenizer": tokenizer_for("opt")}
    assert not any(parameter.requires_grad for parameter in merged["model"].parameters())
    merged["model"].save_pretrained(tmp_path / "merged")
    loaded = {"model": AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), "tokenizer": tokenizer_for("opt")}
    options |= {} if method == "head-feedback" else {"lr": 0.01, "rank": None}
    options = {key: value for key, value in (ROWS | SETTINGS | options).items() if value is not None}
    run, other = tezo.train(**merged, **options), tezo.train(**loaded, **options)
    assert run.summary["after"] == other.summary["after"] != run.summary["before"]
    assert any("merge_and_unload()" in notice for notice in run.summary["notices"])
    assert not any("merge_and_unload()" in notice for notice in other.summary["notices"])


# Models that give no numbers


@pytest.fixture(scope="module")
def overflowing(home, tmp_path_factory):
    """A model whose activations fit float32 and bfloat16, and not float16, without a norm behind them."""
    folder = tmp_path_factory.mktemp("overflowing") / "model"
    model = AutoModelForCausalLM.from_pretrained(home / "opt")
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.weight.mul_(300)
        model.model.decoder.layers[0].fc2.weight.mul_(3000)
    model.save_pretrained(folder)
    tokenizer_for("opt").save_pretrained(folder)
    return folder


PROMPTS = [{"prompt": "the film was", "completion": " good"}, {"prompt": "my room is", "completion": " cold"}] * 6
WAYS = {
    "train": lambda model, rows, out: train(output=out, model=model, data=rows, dev=rows),
    "auto": lambda model, rows, out: command_line("train", "--model", model, "--data", rows, "--output", out),
    "eval": lambda model, rows, _: command_line("eval", model, "--data", rows),
    "predict": lambda model, rows, out: command_line("predict", model, "--input", rows, "--output", out),
}


@pytest.mark.parametrize("shape", ["labels", "text"])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_overflows_in_float16_is_told_from_a_rate_that_is_too_high(tmp_path, overflowing, way, shape):
    rows = write_rows(tmp_path / "rows.jsonl", ROWS["data"] if shape == "labels" else PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(overflowing, dtype=torch.float16)
    half = tmp_path / "half"
    model.save_pretrained(half)
    tokenizer_for("opt").save_pretrained(half)
    done = WAYS[way](half, rows, tmp_path / "out")
    refused(done, "nan in float16", "float32 or bfloat16")
    assert "lr" not in done.err.splitlines()[-1] and not (tmp_path / "out").is_file()
    if way in ("eval", "predict"):
        found = WAYS[way](overflowing, rows, tmp_path / "out")
        assert found.code == 0, found.err


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_is_blamed_where_it_is_at_fault_alone(dtype):
    base = in_memory(dtype)
    with torch.no_grad():
        base["model"].model.decoder.final_layer_norm.weight[0] = float("nan")
    blamed = {torch.float32: "nan in float32; its weights", torch.float16: "nan in float16; .* load it in float32"}
    with pytest.raises(NonFiniteModelError, match=blamed[dtype]):
        trained(base)
    assert trained(in_memory(dtype)).summary["steps"] == 4


def test_a_first_step_that_fails_for_rho_does_not_blame_the_rate():
    with pytest.raises(NonFiniteLossError, match=r"learning rate is not the reason.* lower method\.rho"):
        trained(rho=1e30)


# Standard output


def test_answers_go_to_standard_output_alone(inside, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": row["text"], "other": 12345} for row in ROWS["data"][:5]])
    rows.write_text(rows.read_text().replace("12345", "1e400"))
    assert train(output=tmp_path / "run").code == 0
    there = command_line("predict", tmp_path / "run", "--input", rows, "--output", tmp_path / "answers.jsonl")
    here = command_line("predict", tmp_path / "run", "--input", rows, "--output", "-")
    assert there.code == here.code == 0 and here.out == (tmp_path / "answers.jsonl").read_text()
    assert here.out.count('"other": null') == 5  # JSON has no infinity
    assert len(here.out.splitlines()) == 5 and not (inside / "-").exists()
    refused(command_line("predict", tmp_path / "run", "--input", rows, "--output", "-", "--json"), "--json")
    refused(train(output="-"), "standard output takes no folder")
    refused(command_line("export", tmp_path / "run", "--output", "-"), "standard output takes no folder")


SCRIPT = """
import sys, tezo
from tezo.training.listeners import Listener

class Slow(Listener):
    def stepping(self, step):
        if step == 3:
            print("ready", flush=True)

for attempt in range(2):
    try:
        tezo.train(sys.argv[1], sys.argv[2], method="tezo", lr=0.01, steps=100000, batch_size=4, listeners=[Slow()])
    except Exception as error:
        print("swallowed", error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "number"), [("python", signal.SIGINT), ("cli", signal.SIGTERM)])
def test_a_real_signal_to_a_real_process_is_not_swallowed_and_nothing_is_lost(tmp_path, way, number):
    model, rows = model_folder(tmp_path, "opt"), write_rows(tmp_path / "rows.jsonl", ROWS["data"])
    run = tmp_path / "run"
    arguments = (
        ["-c", SCRIPT, str(model), str(rows)] if way == "python" else
        ["-m", "tezo", "train", "--model", str(model), "--data", str(rows), "--lr", "0.01", "--steps", "100000",
         "--output", str(run)]
    )  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        if way == "python":
            assert process.stdout.readline() == "ready\n"
        else:
            while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").read_text().count("\n") < 3:
                assert process.poll() is None
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "swallowed" not in out and f"stopped by {number.name} after step" in error
    if way == "cli":
        assert f"{number.name}: the step under way is finished and saved first" in error
        assert process.returncode == 128 + number and "--resume" in error and "Traceback" not in error
    else:
        (folder,) = (tmp_path / "temporary").iterdir()
        assert process.returncode != 0 and f"tezo.train(..., output={str(folder)!r}, resume=True)" in error


# Places


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model and rows, as a user's."""
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", ROWS["data"])
    write_rows(root / "dev.jsonl", ROWS["dev"])
    return root


@pytest.fixture
def inside(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


def train(*more, output, model="opt", data="rows.jsonl", dev="dev.jsonl"):
    flags = ("--lr", 0.05, "--steps", 4, "--set", "train.batch_size=4", "--dev", dev)
    return command_line("train", "--model", model, "--data", data, *flags, "--output", output, *more)


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_a_run_started_by_relative_paths_is_opened_from_anywhere(inside, tmp_path, monkeypatch, peft):
    run = tmp_path / "run"
    assert train("--set", f"model.peft={peft}", output=run).code == 0
    here = command_line("eval", run)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = command_line("eval", run)
    assert here.code == there.code == 0 and here.out.splitlines()[1:] == there.out.splitlines()[1:]
    config, adapter = (run / "config.yaml").read_text(), json.loads((run / "adapter/adapter_config.json").read_text())
    assert f"name: {inside}/opt\n" in config and f"train: {inside}/rows.jsonl\n" in config
    assert f"dev: {inside}/dev.jsonl\n" in config and adapter["base_model_name_or_path"] == f"{inside}/opt"
    base = AutoModelForCausalLM.from_pretrained(adapter["base_model_name_or_path"])
    assert PeftModel.from_pretrained(base, run / "adapter") is not None
    card = (run / "adapter/README.md").read_text()
    assert str(inside) not in card and "base_model" not in card.split("---")[1] and "opt" in card


def test_no_path_of_this_machine_is_in_a_whole_model(inside, tmp_path):
    run = tmp_path / "run"
    assert train("--set", "method.name=mezo", output=run).code == 0
    texts = [path.read_text() for path in (run / "model").iterdir() if path.suffix in (".json", ".md", ".jinja")]
    assert texts and not any(str(inside) in text for text in texts)


@pytest.mark.thinned
@pytest.mark.parametrize(
    "ways", [("opt", "{home}/opt"), ("{home}/opt", "opt"), ("opt", "{tmp}/link"), ("../{name}/opt", "opt")]
)
@pytest.mark.parametrize("ended", [False, True])
def test_the_same_model_by_another_path_is_the_same_run(inside, tmp_path, ways, ended):
    (tmp_path / "link").symlink_to(inside / "opt")
    first, second = (way.format(home=inside, tmp=tmp_path, name=inside.name) for way in ways)
    run = tmp_path / "run"
    assert train(output=run, model=first).code == 0
    if not ended:
        unfinished(run)
    done = train("--resume", output=run, model=second)
    assert done.code == 0, done.err
    other = model_folder(tmp_path, "llama")
    refused(train("--resume", output=run, model=other), "model.name", str(inside / "opt"))


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_whose_model_and_rows_have_moved_says_so_and_takes_others(inside, tmp_path, monkeypatch, ended):
    for name in ("opt", "rows.jsonl", "dev.jsonl"):
        copy = shutil.copytree if (inside / name).is_dir() else shutil.copy
        copy(inside / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert train(output="run").code == 0
    if not ended:
        unfinished(tmp_path / "run")
    (tmp_path / "new").mkdir()
    for name in ("opt", "rows.jsonl", "dev.jsonl", "run"):
        (tmp_path / name).rename(tmp_path / "new" / name)
    if ended:
        monkeypatch.chdir(tmp_path / "new")
        refused(command_line("eval", "run"), f"rows of this run were in {tmp_path}/dev.jsonl", "--data")
        refused(command_line("eval", "run", "--data", "dev.jsonl"), f"in {tmp_path}/opt, which is not here", "--set")
        found = command_line("eval", "run", "--data", "dev.jsonl", "--set", "model.name=opt")
        assert found.code == 0, found.err
        moved = {"output": "run", "model": "opt", "data": "rows.jsonl", "dev": "dev.jsonl"}
        done = train("--resume", **moved)
        assert done.code == 0, done.err
        other = write_rows(tmp_path / "other.jsonl", label_rows(20, seed=9))
        refused(train("--resume", **moved | {"data": other}), "data: the rows are not those")
    else:
        done = train("--resume", output="new/run", model="new/opt", data="new/rows.jsonl", dev="new/dev.jsonl")
        assert done.code == 0, done.err
        other = write_rows(tmp_path / "other.jsonl", label_rows(20, seed=9))
        unfinished(tmp_path / "new/run")
        refused(train("--resume", output="new/run", model="new/opt", data=other, dev="new/dev.jsonl"), "data")


# Names that are misspelt


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("runs/modle", "Did you mean 'runs/model'?"), ("rums/model", "Did you mean 'runs/model'?"),
        ("./runs/modle", "Did you mean 'runs/model'?"), ("{tmp}/runs/modle", "Did you mean '{tmp}/runs/model'?"),
        ("runs/nothing-like-it", "in the folder runs here"), ("nobody/nothing", "the hub cannot be reached"),
        ("modle", "Did you mean 'model'?"),
        ("https://huggingface.co/some/body", "Did you mean 'some/body'?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("what", ["model", "data"])
def test_a_misspelt_path_is_said_at_once_with_the_nearest(home, tmp_path, monkeypatch, name, says, what):
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / "runs/model", tmp_path / "model"):
        shutil.copytree(home / "opt", place)
    name, says = name.format(tmp=tmp_path), says.format(tmp=tmp_path)
    began = time.monotonic()
    done = (
        train(output="out", model=name, data=home / "rows.jsonl", dev=home / "dev.jsonl") if what == "model" else
        train(output="out", model=home / "opt", data=name, dev=home / "dev.jsonl")
    )  # fmt: skip
    refused(done, says, f"{what if what == 'model' else 'data.train'}")
    assert time.monotonic() - began < 5 and not (tmp_path / "out").exists()


@contextmanager
def hub(answers):
    """A hub on 127.0.0.1 that answers each request with a code, or never."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if answers is None:
                time.sleep(30)
            self.send_response(answers or 500)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("answer", "says"), [(404, "neither"), ("gone", "cannot be reached")])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_name_that_the_hub_has_not_is_said_after_one_request(monkeypatch, answer, says, kind):
    with hub(answer) as url:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url if answer != "gone" else "http://127.0.0.1:9")
        began = time.monotonic()
        with pytest.raises(RequestError, match=says):
            load_model("nobody/nothing") if kind == "model" else read_rows("nobody/nothing", key="data")
        assert time.monotonic() - began < 5


def test_a_downloaded_model_is_loaded_without_a_network(home, tmp_path, monkeypatch):
    place = tmp_path / "models--some--body"
    shutil.copytree(home / "opt", place / "snapshots/abc")
    (place / "refs").mkdir()
    (place / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()  # a folder of that name does not hide it
    assert load_model("some/body").fingerprint == load_model(str(home / "opt")).fingerprint
