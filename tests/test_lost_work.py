"""Work that is not lost: interrupted runs, runs in other folders, models that are free again."""

import gc
import os
import signal
import subprocess
import sys
import tempfile

import pytest
import torch
from folders import label_rows, model_folder, tiny_model, tokenizer_for, write_rows
from folders import tezo as command_line

import tezo
from tezo.errors import RequestError, RunError, RunInterrupted
from tezo.training.execution.listeners import Listener

ROWS = {"data": label_rows(20), "dev": label_rows(8, seed=1)}
SETTINGS = {"steps": 4, "batch_size": 4, "lr": 0.05, "rank": 4, "eval_every": 2}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where temporary run folders go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


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
        "search": "tezo.optim.learning_rate._Search._trial",
        "evaluation": "tezo.training.execution.evaluations.Evaluations.of",
        "step": "tezo.training.execution.loop.Loop._log_step",
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(place, lambda *_, **__: fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            trained(base, lr="auto")
    assert torch.equal(outputs(base["model"]), untouched)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in base["model"].modules())
    assert trained(base).summary["after"] == trained().summary["after"]


SCRIPT = """
import sys, tezo
from tezo.training.execution.listeners import Listener

class Slow(Listener):
    def stepping(self, step):
        if step == 3:
            print("ready", flush=True)

for attempt in range(2):
    try:
        tezo.train(sys.argv[1], sys.argv[2], lr=0.01, steps=100000, batch_size=4, listeners=[Slow()])
    except Exception as error:
        print("swallowed", error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["python", "cli"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
        assert process.returncode == 128 + number and "--resume" in error and "Traceback" not in error
    else:
        (folder,) = (tmp_path / "temporary").iterdir()
        assert process.returncode != 0 and f"tezo.train(..., output={str(folder)!r}, resume=True)" in error
