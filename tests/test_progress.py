"""No second and no pass of a command is unaccounted for, and none goes by in silence."""

import functools
import io
import itertools
import json
import pkgutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from logging import getLogger
from types import SimpleNamespace

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, settings, tezo, write_rows
from short_runs import stopped
from trainers import token_rows, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTForCausalLM
from transformers.utils import logging

import tezo as library
from tezo.runs.files import MANIFEST, write_manifest
from tezo.runs.reader import read_run
from tezo.runs.words import measured_rows_text, work_of, work_text
from tezo.system import progress
from tezo.system.errors import RequestError
from tezo.system.progress import (
    BASIS,
    DRAWING,
    EARLIER,
    FILES,
    LIBRARIES,
    LOADING,
    MERGING,
    OBJECTIVE,
    OPENING,
    OTHER,
    RATE,
    SAVING,
    SCORER,
    SETTING_UP,
    STEPS,
    Meter,
    StatusLine,
    current,
    duration_text,
    showing,
    tracked,
)
from tezo.system.warned import warned
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.screen import Screen
from tezo.training.settings import parse_config

BATCH = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("home")
    model_folder(root, "opt")
    write_rows(root / "rows.jsonl", completion_rows(24))
    write_rows(root / "dev.jsonl", completion_rows(6, seed=1))
    write_rows(root / "labels.jsonl", label_rows(24))
    return root


def recipe(home, name, rows="rows.jsonl", dev="dev.jsonl", **changes):
    options = {key: changes.pop(key) for key in ("lr", "rank") if key in changes}
    return parse_config(
        {
            "model": {"name": str(home / "opt")},
            "data": {"train": str(home / rows), "dev": str(home / dev)},
            "method": {"name": name, "lr": 1e-3, **options},
            "train": {"batch_size": BATCH, "steps": 6, **changes},
        }
    )


@contextmanager
def rows_through(cls):
    """Counts, at the class itself, the rows of every forward pass: what a meter knows nothing of."""
    seen, plain = [], cls.forward

    def forward(self, *args, **named):
        seen.append(len(named["input_ids"] if "input_ids" in named else args[0]))
        return plain(self, *args, **named)

    cls.forward = forward
    try:
        yield seen
    finally:
        cls.forward = plain


def passes(phases):
    return sum(spent["passes"] for spent in phases.values())


METHODS = {
    "tezo": {"rank": 2},
    "mezo-conservative": {},
    "forward-gradient": {},
    "adam": {},
    "head-feedback": {"rank": 2, "lr": "auto", "feedback_first": 2, "feedback_last": 1, "steps": 150},
}


class Clock:
    """A clock that a test sets, in the place of the one that a meter and a line of its work read."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=self.read, monotonic=self.read))

    def read(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def slowed(monkeypatch, clock, then=lambda: None):
    """Forward passes take 10 ms of the clock each; `then` is called after each."""
    plain = OPTForCausalLM.forward

    def slow(self, *args, **named):
        clock.now += 0.01
        then()
        return plain(self, *args, **named)

    monkeypatch.setattr(OPTForCausalLM, "forward", slow)


@pytest.mark.parametrize("name", METHODS)
def test_every_pass_and_second_of_a_run_is_in_its_phases(home, tmp_path, monkeypatch, clock, name):
    made = recipe(home, name, **METHODS[name])
    slowed(monkeypatch, clock)
    with rows_through(OPTForCausalLM) as seen:
        summary = train(made, tmp_path / "run")
    phases = summary["phases"]
    assert passes(phases) == pytest.approx(sum(seen) / BATCH, abs=0.01 * len(phases))
    assert sum(spent["seconds"] for spent in phases.values()) == pytest.approx(clock.now, abs=1e-3 * len(phases))
    # a step's evaluations are passes of a batch, whether signs share a call, or lengths divide it
    assert phases[STEPS]["passes"] == summary["num_forward_passes"]
    assert (RATE in phases and phases[RATE]["passes"] > 5) == (name == "head-feedback")


def test_a_row_that_is_several_rows_of_the_model_is_counted_as_one(home, tmp_path):
    model_folder(home, "bert")
    made = parse_config(
        {
            "model": {"name": str(home / "bert")},
            "data": {"train": str(home / "labels.jsonl"), "hold_out": 0.25},
            "method": {"name": "mezo", "lr": 1e-3},
            "train": {"batch_size": BATCH, "steps": 3},
        }
    )
    summary = train(made, tmp_path / "run")
    # beside them, a pass at most after each evaluation that compares a high loss with the model's own
    assert summary["num_forward_passes"] == 6 and summary["phases"][STEPS]["passes"] in range(6, 10)


def test_what_earlier_starts_have_taken_is_added(home, tmp_path):
    made = recipe(home, "tezo", rank=2, log_every=1, checkpoint_every=2)
    with rows_through(OPTForCausalLM) as first:
        stopped(made, tmp_path / "run", 3)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    known = [line for line in lines if "elapsed" in line][-1]
    with rows_through(OPTForCausalLM) as second:
        summary = train(made, tmp_path / "run", resume=True)
    earlier = summary["phases"][EARLIER]
    assert (earlier["seconds"], earlier["passes"]) == (known["elapsed"], known["passes"])
    lost = sum(first) / BATCH - known["passes"]
    assert 0 <= lost < 1, "what was done after the last line is not known"
    assert passes(summary["phases"]) == pytest.approx((sum(first) + sum(second)) / BATCH - lost, abs=0.1)
    assert any("up to their last line" in notice for notice in summary["notices"])
    assert "at least" in work_text(summary) and "at least" not in work_text(summary | {"phases": {}})


def test_what_is_said_of_the_work_counts_all_of_it(home, tmp_path):
    summary = train(recipe(home, "head-feedback", rank=2, lr="auto"), tmp_path / "run")
    total, seconds = work_of(summary)
    assert total == passes(summary["phases"]) > 2 * summary["num_forward_passes"]
    longest = max(summary["phases"], key=lambda name: summary["phases"][name]["seconds"])
    said = f"{round(total):,} forward passes of {summary['batch_size']} rows, {duration_text(seconds)} ("
    assert said in work_text(summary) and longest in work_text(summary)
    assert work_of({"num_forward_passes": 7, "seconds_stepping": 2.0}) == (7, 2.0), "a run of an earlier version"
    assert read_run(tmp_path / "run").summary["phases"] == summary["phases"]
    for odd in ([], {"steps": 3}, {"steps": {"seconds": "1", "passes": 2}}, {"steps": {"passes": 2}}):
        (tmp_path / "run/summary.json").write_text(json.dumps(summary | {"phases": odd}))
        write_manifest(tmp_path / "run", [path.name for path in (tmp_path / "run").iterdir() if path.name != MANIFEST])
        with pytest.raises(RequestError, match="phases"):
            read_run(tmp_path / "run")


def test_a_listener_hears_of_phases_before_there_is_a_job_and_of_how_far_they_are(home, tmp_path):
    heard = []

    class Hearing(Listener):
        def working(self, work):
            heard.append(work)

        def started(self, job):
            heard.append(job)

    train(recipe(home, "head-feedback", rank=2, lr="auto"), tmp_path / "run", [Hearing()])
    started = next(i for i, one in enumerate(heard) if not hasattr(one, "name"))
    before = dict.fromkeys(work.name for work in heard[:started])
    assert [name for name in before if name != OTHER][:2] == ["reading rows", "loading the model"]
    assert RATE in before and BASIS in before
    steps = [(work.done, work.total) for work in heard[started + 1 :] if work.name == STEPS and work.unit]
    assert steps[0] == (0, 6) and steps[-1] == (6, 6) and steps == sorted(steps)


def test_a_meter_leaves_nothing_on_the_model(home, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(home / "opt")
    tokenizer = AutoTokenizer.from_pretrained(home / "opt")
    run = library.train(model, home / "rows.jsonl", tokenizer=tokenizer, method="tezo", lr=1e-3, rank=2, steps=2)
    run.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_innermost_phase_counts_and_all_add_up(clock):
    with Meter() as meter:
        clock.now += 1
        with meter.phase("outer"):
            clock.now += 2
            with current().phase("inner"):
                clock.now += 4
            clock.now += 8
        clock.now += 16
        seconds = {name: spent["seconds"] for name, spent in meter.phases.items()}
        assert seconds == {OTHER: 17, "outer": 10, "inner": 4}
    assert current() is not meter


def test_what_is_left_is_what_the_pace_so_far_says_and_a_long_unit_does_not_make_it_rise(clock):
    with Meter() as meter, meter.phase("counting"):
        for i in tracked(range(4), "parts"):
            assert (meter.work.done, meter.work.total) == (i, 4)
            assert meter.work.left == (pytest.approx(10.0 * (4 - i)) if i else None)
            clock.now += 4
            assert meter.work.left == (pytest.approx(10.0 * (4 - i) - 4) if i else None)
            clock.now += 6
            assert meter.work.left == (pytest.approx(10.0 * (3 - i), abs=1e-9) if i else None)
        meter.report(1, 2, "others")
        assert (meter.work.done, meter.work.total) == (4, 4), "the phase counts parts"
    with Meter() as meter, meter.phase("counting"):
        for i in tracked(range(4), "parts"):
            clock.now += 10 if i < 2 else 100
            assert i < 2 or meter.work.left == pytest.approx({2: 10.0, 3: 0.0}[i])


def test_what_is_left_of_a_second_count_is_not_by_the_time_of_the_first(clock):
    with Meter() as meter, meter.phase("counting twice"):
        for _ in tracked(range(2), "parts"):
            clock.now += 10
        for i in tracked(range(4), "parts"):
            clock.now += 1
            assert i == 0 or meter.work.left == pytest.approx(4 - i - 1)
        assert meter.work.seconds == 24


class Stamped(io.StringIO):
    """Text with the time of each line."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.times = clock, [0.0]

    def write(self, text):
        self.times.append(self.clock.now)
        return super().write(text)

    @property
    def longest(self):
        """The longest time without a line, until now."""
        times = [*self.times, self.clock.now]
        return max(after - before for before, after in itertools.pairwise(times))


SILENCE = 8000.0
"""Seconds that a line may say nothing: so many that its thread never looks by itself while a test sets the clock."""


def test_no_silence_is_longer_than_it_may_be(clock):
    stream = Stamped(clock)
    with Meter() as meter, StatusLine(meter, stream, silence=SILENCE) as line, meter.phase("one slow call"):
        for _ in range(40):
            clock.now += SILENCE / 8
            line.look()
    assert stream.longest == SILENCE
    first, *others = stream.getvalue().splitlines()
    assert first == "one slow call" and [text.removeprefix(f"{first}, ") for text in others] == [
        duration_text(SILENCE * (i + 1)) for i in range(5)
    ]


def test_a_thread_looks_whether_something_is_to_be_said():
    class Noting(io.StringIO):
        def write(self, text):
            if text.startswith("one slow call, "):
                said.set()
            return super().write(text)

    said = threading.Event()
    with Meter() as meter, StatusLine(meter, Noting(), silence=0.01), meter.phase("one slow call"):
        said.wait()


def test_a_slow_search_says_how_far_it_is_though_each_of_its_steps_is_slow(home, tmp_path, monkeypatch, clock):
    stream = Stamped(clock)
    with Meter() as meter, StatusLine(meter, stream, silence=0.15) as line:
        slowed(monkeypatch, clock, line.look)
        train(recipe(home, "head-feedback", rank=2, lr="auto", steps=60), tmp_path / "run")
    assert stream.longest <= 0.16 + 1e-9
    said = stream.getvalue()
    assert f"{RATE}\n" in said and "steps, " in said and "left" in said


def test_work_without_a_name_is_said_to_be_behind_the_one_that_has_one(clock):
    stream = io.StringIO()
    with Meter() as meter, StatusLine(meter, stream, silence=SILENCE) as line:
        clock.now += SILENCE
        line.look()
        with meter.phase("loading"):
            pass
        clock.now += SILENCE
        line.look()
    assert stream.getvalue().splitlines() == ["starting, 2 h 13 min", "loading", "after loading, 2 h 13 min"]


def test_on_a_terminal_one_line_is_overwritten_and_gone_at_the_end(clock):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Meter() as meter, StatusLine(meter, stream) as line:
        with meter.phase("loading"):
            clock.now += 0.7
            line.look()
            line.print("a line that stays")
        with meter.phase("stepping"):
            pass
    shown = [""]
    for char in stream.getvalue():  # what a terminal shows in the end
        if char == "\r":
            shown[-1], column = shown[-1], 0
        elif char == "\n":
            shown.append("")
            column = 0
        else:
            shown[-1] = shown[-1][:column].ljust(column) + char + shown[-1][column + 1 :]
            column += 1
    assert [line.rstrip() for line in shown] == ["a line that stays", ""]
    assert "loading, 0.7 s" in stream.getvalue() and "stepping" in stream.getvalue()


def test_the_line_has_the_figure_of_the_newest_evaluation(home, tmp_path):
    class Watch(Listener):
        def evaluated(self, *evaluation):
            seen.append((evaluation[2]["loss"], line.figures.get(STEPS, "")))

    seen: list[tuple[float, str]] = []
    with Meter() as meter, StatusLine(meter, io.StringIO()) as line:
        train(recipe(home, "tezo", eval_every=2, keep_best=False), tmp_path / "run", [Screen(line), Watch()])
    between = [(loss, text) for loss, text in seen if text][:3]
    assert len(between) == 3 and all(f"-> {loss:.4f}" in text for loss, text in between)


def test_a_stream_that_nobody_reads_ends_no_run(clock):
    class Broken(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    with Meter() as meter, StatusLine(meter, Broken(), silence=SILENCE) as line, meter.phase("working"):
        clock.now += SILENCE
        line.look()


def test_python_shows_what_a_run_does_unless_told_not_to(home, tmp_path, capsys):
    given = {"method": "tezo", "lr": 1e-3, "rank": 2, "steps": 2}
    run = library.train(home / "opt", home / "rows.jsonl", **given)
    said = capsys.readouterr()
    assert "loading the model\n" in said.err and "steps\n" in said.err and said.out == ""
    run.evaluate()
    assert "evaluating\n" in capsys.readouterr().err
    run.close()
    verbosity = logging.get_verbosity()
    logging.enable_progress_bar()
    quiet = library.train(home / "opt", home / "rows.jsonl", progress=False, output=tmp_path / "run", **given)
    quiet.export(tmp_path / "tuned", "merged")
    opened = library.open_run(tmp_path / "run")
    opened.progress = False
    assert opened.model is not None and capsys.readouterr().err == ""
    assert logging.is_progress_bar_enabled() and logging.get_verbosity() == verbosity
    with showing(wanted=False) as line:
        assert line is None


def test_the_trainer_shows_what_comes_before_its_bar(tmp_path, capsys):
    rows = token_rows(12)
    trainer(tmp_path / "a", rows=rows, method="head-feedback", disable_tqdm=False, max_steps=1).train()
    assert BASIS in capsys.readouterr().err
    trainer(tmp_path / "b", rows=rows, method="head-feedback", max_steps=1).train()
    assert BASIS not in capsys.readouterr().err


def test_commands_say_what_they_do_on_standard_error_alone(home, tmp_path):
    train(recipe(home, "tezo", rank=2), tmp_path / "run")
    for command, phase in (
        (("eval", tmp_path / "run", "--json"), "evaluating"),
        (("predict", tmp_path / "run", "--input", home / "dev.jsonl", "--output", tmp_path / "a.jsonl", "--json"),
         "writing answers"),
        (("export", tmp_path / "run", "--output", tmp_path / "out", "--json"), "saving"),
        (("replay", tmp_path / "run", "--output", tmp_path / "again", "--json"), "steps"),
    ):  # fmt: skip
        done = tezo(*command)
        assert done.code == 0, done.err
        json.loads(done.out)
        assert {LIBRARIES, "loading the model", phase} <= set(done.err.splitlines()), command[0]


IMPORTED = """
import sys
class First:
    def write(self, text):
        sys.__stdout__.write(f"{text.strip()}: {'torch' in sys.modules}\\n")
        sys.__stdout__.flush()
        sys.stderr = sys.__stderr__
    def flush(self): pass
    def isatty(self): return False
sys.stderr = First()
sys.argv = ["tezo", "train", "--model", "nowhere", "--data", "rows.jsonl", "--output", "run"]
from tezo.cli.main import main
main()
"""


@pytest.mark.slow
def test_the_first_line_comes_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == f"{LIBRARIES}: False"


SEARCHED = settings(method="head-feedback", method__rank=2, train__batch_size=BATCH)


@pytest.mark.parametrize(("rows", "each"), [("rows.jsonl", 1), ("labels.jsonl", 2)])
def test_a_dry_run_makes_at_most_two_passes_and_says_what_a_run_measures(home, rows, each):
    with rows_through(OPTForCausalLM) as seen:
        done = tezo("train", "--model", home / "opt", "--data", home / rows, *SEARCHED, "--dry-run", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["passes"] == pytest.approx(sum(seen) / (BATCH * each), abs=0.01) and found["passes"] <= 2
    assert sum(count >= BATCH for count in seen) == 1, "the others are of a row"
    assert {"method.lr", "method.basis", "train.feedback_first"} <= set(found["measured"])
    assert found["settings"]["method"]["lr"] == "auto" and found["seconds"]["measurements"] > 0


def test_a_model_in_half_precision_on_a_cpu_that_emulates_it_is_said_to_be_slow(home, monkeypatch):
    from tezo.models import loading

    for emulated in (True, False):
        monkeypatch.setattr(loading, "is_emulated", lambda dtype, emulated=emulated: emulated and dtype.itemsize == 2)
        notices = loading.load_model(str(home / "opt"), dtype="bfloat16").notices
        assert any("several times as long as in float32" in notice for notice in notices) == emulated
    assert not loading.load_model(str(home / "opt"), dtype="float32").notices
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("given", "rows", "said"),
    [
        ({}, {"train": 18, "dev": 6, "test": 0}, "6 dev rows, which also chose the step"),
        ({"eval_every": 0}, {"train": 18, "dev": 6, "test": 0}, "6 dev rows"),
        ({"test": "dev.jsonl"}, {"train": 18, "dev": 6, "test": 6}, "6 test rows"),
    ],
)
def test_dev_rows_are_called_dev_rows_everywhere(home, tmp_path, given, rows, said):
    named = {"method": "tezo", "rank": 2, "lr": 1e-3, "steps": 4, "hold_out": 0.25, "output": tmp_path / "run"}
    named |= given | ({"test": home / given["test"]} if "test" in given else {})
    run = library.train(home / "opt", home / "rows.jsonl", **named)
    assert run.summary["rows"] == rows and measured_rows_text(run.summary) == said
    kind = said.split()[1]
    card = (tmp_path / "run/adapter/README.md").read_text()
    assert f"On the 6 {kind} rows." in card and ("test" in card.partition("## Loading")[0]) == (kind == "test")
    assert "the dev loss" in run.summary["verdict"]
    run.close()


HEAVY = {
    "tezo.training.job.load_score": SCORER,
    "tezo.models.loading.resolve_name": LOADING,
    "tezo.optim.optimizer.ZerothOrderOptimizer.__init__": SETTING_UP,
    "tezo.training.loop.check_objective": OBJECTIVE,
    "tezo.runs.folder.newest": OPENING,
    "tezo.runs.folder.write_manifest": SAVING,
    "tezo.runs.folder.RunFolder.check_ended": FILES,
    "tezo.training.opening.check_manifest": FILES,
    "tezo.models.lora._merged": MERGING,
    "tezo.report.page.page": DRAWING,
}
"""What takes long with a large model, a scorer with a model of its own, or a full folder -> what is said meanwhile."""


def test_what_can_take_long_has_a_name_on_the_screen(home, tmp_path, monkeypatch):
    heard = {place: set() for place in HEAVY}

    def noting(place):
        plain = pkgutil.resolve_name(place)

        @functools.wraps(plain)
        def note(*args, **named):
            heard[place].add(current().work.name)
            return plain(*args, **named)

        return note

    for place in HEAVY:
        monkeypatch.setattr(place, noting(place))
    (tmp_path / "score.py").write_text("def length(prompt, completion, row):\n    return len(completion)\n")
    named = {"train__max_new_tokens": 1, "method__num_directions": 2, "method__rank": 2, "train__batch_size": 2}
    flags = ("--model", home / "opt", "--data", home / "rows.jsonl", "--reward", f"{tmp_path / 'score.py'}:length")
    run = tmp_path / "run"
    for line in (
        ("train", *flags, "--steps", 1, "--output", run, *settings(**named)),
        ("train", *flags, "--steps", 1, "--output", run, *settings(**named), "--resume"),
        ("export", run, "--format", "merged", "--output", tmp_path / "merged"),
        ("report", run, "--output", tmp_path / "page.html"),
    ):
        done = tezo(*line)
        assert done.code == 0, done.err
    assert heard == {place: {name} for place, name in HEAVY.items()}


def test_warnings_are_kept_from_all_threads_and_shown_once(capsys):
    logger, root = getLogger("tezo.engines.server"), getLogger()
    handlers, root.handlers = root.handlers, []  # as where nobody has set up logging
    try:
        with warned() as outer, warned() as inner:
            worker = threading.Thread(target=logger.warning, args=("%s is asked again.", "it"))
            worker.start()
            worker.join()
            logger.warning("it is asked again.")
            logger.info("it answers.")
            getLogger("other").warning("nothing of ours")
    finally:
        root.handlers = handlers
    assert [*outer] == [*inner] == ["it is asked again."]
    assert capsys.readouterr().err == "it is asked again.\n" * 2 + "nothing of ours\n"
    logger.warning("it is gone.")
    assert [*outer] == ["it is asked again."]
