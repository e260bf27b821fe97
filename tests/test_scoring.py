"""Scorers: the forms of functions, failures that are missing scores, and processes of their own."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pandas
import pytest
import torch

from tezo.runs.reader import MAX_NUMBER
from tezo.system.errors import RequestError
from tezo.tasks.scorers import load_score
from tezo.tasks.scores import LARGEST
from tezo.tasks.scoring import TRIES, Sample, scored
from tezo.tasks.scoring_processes import Processes

SAMPLES = [Sample(f"prompt {i}", f"answer {i}", {"most": i}, f"line {i + 1}") for i in range(3)]


def values(function, samples=SAMPLES):
    return [own.value for own in scored(function, samples)]


def by_row(prompt, completion, row):
    return row["most"] + 10 * completion.startswith("answer")


def by_dictionary(sample):
    return sample["most"] + 10 * sample["completion"].startswith("answer")


def as_trl(prompts, completions, **columns):
    return [most + 10 * text.startswith("answer") for most, text in zip(columns["most"], completions, strict=True)]


def as_trl_without_columns(completions):
    return [10.0 + int(text[-1]) for text in completions]


async def later(prompt, completion, row):
    await asyncio.sleep(0.01)
    return row["most"] + 10


@pytest.mark.parametrize("function", [by_row, by_dictionary, as_trl, as_trl_without_columns, later])
def test_every_form_of_function_says_the_same(function):
    assert values(function) == [10, 11, 12]


def test_calls_that_wait_do_so_together():
    async def slow(prompt, completion, row):
        await asyncio.sleep(0.2)
        return 1.0

    started = time.perf_counter()
    assert values(slow, SAMPLES * 10) == [1.0] * 30
    assert time.perf_counter() - started < 2


def as_trl_of_messages(prompts, completions, most):
    assert prompts == [[{"role": "user", "content": f"prompt {i}"}] for i in range(3)]
    assert [[message["role"] for message in own] for own in completions] == [["assistant"]] * 3
    return [
        own + 10 * message["content"].startswith("answer") for own, (message,) in zip(most, completions, strict=True)
    ]


def test_a_function_of_trls_form_gets_messages_where_the_rows_have_messages():
    asked = [replace(own, messages=({"role": "user", "content": own.prompt},)) for own in SAMPLES]
    assert values(as_trl_of_messages, asked) == values(by_row, asked) == [10, 11, 12]


@pytest.mark.parametrize(
    "made",
    [
        numpy.array, torch.tensor, tuple, pandas.Series, lambda own: torch.tensor(own, requires_grad=True),
        lambda own: [numpy.float32(one) for one in own], lambda own: [torch.tensor(one) for one in own],
        lambda own: [numpy.array([one]) for one in own], lambda own: [torch.tensor([one]) for one in own],
    ],
    ids=["array", "tensor", "tuple", "series", "with gradient", "scalars", "0-d", "arrays of one", "tensors of one"],
)  # fmt: skip
def test_scores_may_be_arrays_and_tensors(made):
    def of_all(completions):
        return made([float(text[-1]) for text in completions])

    def of_one(prompt, completion, row):
        return next(iter(made([float(completion[-1])])))

    assert values(of_all) == values(of_one) == [0, 1, 2]
    assert values((of_all, of_one)) == [0, 2, 4]


def test_a_part_that_is_none_is_left_out_of_the_sum_as_trl_does():
    given = [{"form": 0.5, "length": None}, {"form": math.nan, "length": 0.25}, {"form": None, "length": None}]

    def partly(prompt, completion, row):
        return given[row["most"]]

    found = scored(partly, SAMPLES)
    assert [own.value for own in found[:2]] == [0.5, 0.25] and math.isnan(found[2].value)
    assert [dict(own.parts) for own in found] == [{"form": 0.5}, {"length": 0.25}, {}]
    assert [list(own.lacks) for own in found] == [["length"], ["form"], []]
    assert [own.failure is None for own in found] == [True, True, False]


def test_several_scorers_are_added_as_trl_does():
    def length(completions):
        return [None if text[-1] == "1" else float(len(text)) for text in completions]

    def named(prompt, completion, row):
        return {"a": 1.0, "b": row["most"]}

    async def fails(prompt, completion, row):
        if row["most"] == 2:
            raise OSError("gone")
        return 0.5

    found = scored((length, named, fails, fails), SAMPLES)
    assert [own.value for own in found[:2]] == [8 + 1 + 0 + 0.5 + 0.5, 1 + 1 + 0.5 + 0.5]
    assert found[0].parts == {"length": 8, "named.a": 1, "named.b": 0, "fails": 0.5, "fails 2": 0.5}
    assert list(found[1].lacks) == ["length"]
    assert math.isnan(found[2].value) and found[2].failure == "raised OSError (gone)"  # it is not known to be none
    assert all(math.isnan(value) for value in values((length, length), SAMPLES[1:2]))


class Panic(BaseException):
    """As extensions in Rust raise."""


@pytest.mark.parametrize("error", [SystemExit(3), Panic("lost"), GeneratorExit("end"), asyncio.CancelledError("late")])
@pytest.mark.parametrize("form", ["plain", "async", "batch", "async batch", "number"])
def test_whatever_a_scorer_raises_is_a_missing_score(error, form):
    def plain(prompt, completion, row):
        raise error

    async def later(prompt, completion, row):
        await asyncio.sleep(0)
        raise error

    def batch(completions):
        raise error

    async def batch_later(completions):
        await asyncio.sleep(0)
        raise error

    class Number:
        def __float__(self):
            raise error

    def number(prompt, completion, row):
        return Number()

    forms = {"plain": plain, "async": later, "batch": batch, "async batch": batch_later, "number": number}
    found = scored(forms[form], SAMPLES)
    assert all(math.isnan(own.value) and type(error).__name__ in own.failure for own in found)


@pytest.mark.parametrize("form", ["plain", "async", "batch", "async batch"])
def test_an_interrupt_in_a_scorer_stays_an_interrupt(form):
    def plain(prompt, completion, row):
        raise KeyboardInterrupt

    async def later(prompt, completion, row):
        raise KeyboardInterrupt

    def batch(completions):
        raise KeyboardInterrupt

    async def batch_later(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored({"plain": plain, "async": later, "batch": batch, "async batch": batch_later}[form], SAMPLES)


def test_a_real_interrupt_while_scorers_wait_is_no_second_try():
    calls = []

    async def waits(prompt, completion, row):
        calls.append(row)
        if len(calls) == len(SAMPLES):
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        scored(waits, SAMPLES)
    assert len(calls) == len(SAMPLES)


def test_a_message_of_an_error_is_short_and_on_one_line():
    class UnsayableError(Exception):
        def __str__(self):
            raise ValueError

    def says(error):
        def scorer(prompt, completion, row):
            raise error

        return scored(scorer, SAMPLES[:1])[0].failure

    long = says(ValueError("a\nb " + "x" * 9999))
    assert long.startswith("raised ValueError (a b xxx") and len(long) < 200
    assert says(UnsayableError()) == "raised UnsayableError"
    assert says(ValueError()) == "raised ValueError"


def test_named_parts_are_added_and_kept():
    (found, *_) = scored(lambda *_: {"form": 0.5, "length": 0.25}, SAMPLES)
    assert found.value == 0.75 and found.parts == {"form": 0.5, "length": 0.25}


@pytest.mark.parametrize(
    "value",
    [None, "ten", math.nan, math.inf, {"form": "good"}, {}, 10**400, 10**5000, [0.5], "x" * 9999, -1e16,
     {"form": 1e300, "length": -1e300}],
    ids=type,
)  # fmt: skip
def test_what_is_no_number_that_steps_can_reckon_with_is_missing_and_says_why(value):
    (found, *_) = scored(lambda *_: value, SAMPLES)
    assert math.isnan(found.value) and 0 < len(found.failure) < 200


def test_a_report_reads_the_largest_score():
    assert values(lambda *_: LARGEST) == [LARGEST] * 3 and LARGEST <= MAX_NUMBER


def test_a_call_that_fails_is_made_again_and_then_missing():
    calls = []

    def at_times(prompt, completion, row):
        calls.append(row["most"])
        if row["most"] == 1 and calls.count(1) < TRIES:
            raise OSError("busy")
        if row["most"] == 2:
            raise OSError("gone")
        return row["most"]

    found = scored(at_times, SAMPLES)
    assert [found[0].value, found[1].value] == [0, 1] and math.isnan(found[2].value)
    assert "OSError (gone)" in found[2].failure and calls.count(2) == TRIES


@pytest.mark.parametrize("form", ["plain", "async", "batch"])
def test_a_call_that_would_end_the_process_is_missing(form):
    def ends(prompt, completion, row):
        sys.exit("enough")

    async def ends_later(prompt, completion, row):
        sys.exit("enough")

    def ends_all(completions):
        sys.exit("enough")

    found = scored({"plain": ends, "async": ends_later, "batch": ends_all}[form], SAMPLES)
    assert [own.failure for own in found] == ["raised SystemExit (enough)"] * 3


@pytest.mark.parametrize(
    "parameter",
    ["completion", "prompt", "prompts, **columns", "prompt, completion", "*, prompt, completion, row", "a, b, c, d"],
)
def test_a_function_that_cannot_be_called_in_any_form_is_refused(tmp_path, parameter):
    import tezo

    (tmp_path / "score.py").write_text(f"def score({parameter}): return 1.0")
    with pytest.raises(RequestError, match=r"; write f\(prompt, completion, row\), f\(sample\)"):
        tezo.train("nowhere", [{"prompt": "a"}], reward=f"{tmp_path / 'score.py'}:score")


def test_what_a_scorer_prints_goes_to_standard_error(tmp_path, capsys):
    (tmp_path / "score.py").write_text(
        "print('of the file')\ndef score(prompt, completion, row):\n    print('of a call')"
    )
    scored(load_score(f"{tmp_path / 'score.py'}:score")[0], SAMPLES)
    assert capsys.readouterr() == ("", "of the file\n" + "of a call\n" * 3)


def test_a_function_of_a_batch_must_return_as_many():
    def too_few(completions):
        return completions[:1]

    assert all(math.isnan(value) for value in values(too_few))


FILE = """
import sys, time

def by_row(prompt, completion, row):
    print("what a scorer prints is no answer")
    return row["most"] + 10

def as_trl(prompts, completions, most):
    return [value + 10 for value in most]

def hangs(prompt, completion, row):
    if row["most"] == 1:
        time.sleep(600)
    return row["most"] + 10

def dies(prompt, completion, row):
    if row["most"] == 1:
        sys.stdout.flush()
        import os
        os._exit(3)
    return row["most"] + 10
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "score.py").write_text(FILE)
    return tmp_path / "score.py"


@pytest.mark.parametrize(("function", "batch"), [("by_row", False), ("as_trl", True)])
def test_processes_say_what_this_one_says(file, function, batch):
    processes = Processes(f"{file}:{function}", 2, 60, Path())
    try:
        assert [own.value for own in processes.scored(SAMPLES * 4, batch=batch)] == [10, 11, 12] * 4
    finally:
        processes.close()


def test_ctrl_c_is_not_for_the_processes(file):
    file.write_text("import os\n\n\ndef group(prompt, completion, row):\n    return os.getpgid(0)\n")
    processes = Processes(f"{file}:group", 2, 60, Path())
    try:  # a terminal interrupts the group that the command is in
        assert os.getpgid(0) not in [own.value for own in processes.scored(SAMPLES, batch=False)]
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("function", "seconds", "why"),
    [("hangs", 1, "took more than 1 s"), ("dies", 60, "ended its process (exit status 3)")],
)
def test_a_call_that_hangs_or_dies_is_missing_and_the_others_are_not(file, function, seconds, why):
    processes = Processes(f"{file}:{function}", 2, seconds, Path())
    try:
        for _ in range(2):  # and others take their places
            found = processes.scored(SAMPLES, batch=False)
            assert [found[0].value, found[2].value] == [10, 12]
            assert math.isnan(found[1].value) and found[1].failure == why
    finally:
        processes.close()


FORKS = """
import os, sys, time

NOTE = os.path.join(os.path.dirname(__file__), "pid")

def goes_on(prompt, completion, row):
    copy = os.fork()
    if copy == 0:
        return -1.0  # as if it were asked
    os.waitpid(copy, 0)
    return row["most"] + 10

def fails(prompt, completion, row):
    copy = os.fork()
    if copy == 0:
        raise ValueError("in the copy")
    return row["most"] + 10 if os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 1 else None

def asks(prompt, completion, row):
    copy = os.fork()
    if copy == 0:
        sys.exit(row["most"])
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) + 10

def leaves_one(prompt, completion, row):
    if row["most"] == 1:
        copy = os.fork()
        if copy == 0:
            os.setsid()
            with open(NOTE, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        while not os.path.exists(NOTE) or not open(NOTE).read():
            time.sleep(0.01)
        os._exit(5)
    return row["most"] + 10

async def later(prompt, completion, row):
    copy = os.fork()
    if copy == 0:
        return -1.0
    os.waitpid(copy, 0)
    return row["most"] + 10

def writes_everywhere(prompt, completion, row):
    if row["most"] == 1:
        for handle in range(3, 20):
            try:
                os.write(handle, b'{"number": 1, "scores": [{"value": 7.0, "parts": {}, "failure": null}]}\\n')
            except OSError:
                pass
    return row["most"] + 10
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("function", ["goes_on", "fails", "asks", "later"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_copy_of_the_process_that_a_scorer_forks_gives_no_scores(file, function, workers):
    file.write_text(FORKS)
    scorer = f"{file}:{function}"
    if workers:
        processes = Processes(scorer, workers, 60, Path())
        try:
            found = [processes.scored(SAMPLES, batch=False) for _ in range(3)]
        finally:
            processes.close()
        assert [[own.value for own in each] for each in found] == [[10, 11, 12]] * 3
    else:
        code = (
            "from tezo.tasks.scorers import load_score; from tezo.tasks.scoring import Sample, scored\n"
            f"samples, function = {SAMPLES}, load_score({scorer!r})[0]\n"
            "for _ in range(3): print([own.value for own in scored(function, samples)], flush=True)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.splitlines() == ["[10.0, 11.0, 12.0]"] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_ended_is_known_where_a_copy_of_it_lives_on(file):
    file.write_text(FORKS)
    processes = Processes(f"{file}:leaves_one", 1, 60, Path())
    try:
        found = processes.scored(SAMPLES, batch=False)
    finally:
        processes.close()
        os.kill(int((file.parent / "pid").read_text()), signal.SIGKILL)
    assert [own.failure for own in found] == [None, "ended its process (exit status 5)", None]


def test_an_answer_that_was_not_asked_for_is_no_score(file):
    file.write_text(FORKS)
    processes = Processes(f"{file}:writes_everywhere", 1, 60, Path())
    try:
        for _ in range(3):
            found = processes.scored(SAMPLES, batch=False)
            assert [found[0].value, found[2].value] == [10, 12]
            assert math.isnan(found[1].value) and found[1].failure == "sent what is no answer to this call"
    finally:
        processes.close()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
def test_programs_that_a_scorer_starts_have_neither_pipe_and_end_with_it(file, tmp_path, capfd):
    file.write_text(f"""
import subprocess, sys

def asks(prompt, completion, row):
    print("and what it asks is nobody's")
    code = "import sys; print('loud'); sys.exit(len(sys.stdin.read()))"
    return 10 + subprocess.run([sys.executable, "-c", code]).returncode

def waits(prompt, completion, row):
    code = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    return subprocess.run([sys.executable, "-c", code]).returncode
""")
    processes, started = Processes(f"{file}:asks", 1, 60, Path()), time.monotonic()
    try:
        assert [own.value for own in processes.scored(SAMPLES[:1], batch=False)] == [10]
    finally:
        processes.close()
    assert "loud" in capfd.readouterr().err
    processes = Processes(f"{file}:waits", 1, 3, Path())
    try:
        (found,) = processes.scored(SAMPLES[:1], batch=False)
        assert found.failure == "took more than 3 s" and time.monotonic() - started < 60
    finally:
        processes.close()
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").is_file() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return  # ended, and nobody has asked for its status
        time.sleep(0.1)
    raise AssertionError(f"{pid} is alive")


def test_a_call_that_waits_and_fails_in_any_way_is_made_again_and_then_missing():
    calls = []

    def at_once(prompt, completion, row):
        async def later():
            raise asyncio.CancelledError

        calls.append(row)
        if len(calls) == 2:
            raise RuntimeError("rate limit")
        return later()

    (found,) = scored(at_once, SAMPLES[:1])
    assert math.isnan(found.value) and found.failure.startswith("raised CancelledError") and len(calls) == 3


def test_a_file_that_other_processes_cannot_run_gives_no_scores_and_says_so(tmp_path):
    (tmp_path / "score.py").write_text(
        "import sys\nif 'scoring' in sys.argv[0]:\n    sys.exit(5)\ndef f(*_): return 1\n"
    )
    processes = Processes(f"{tmp_path / 'score.py'}:f", 2, 60, Path())
    try:
        found = processes.scored(SAMPLES, batch=False)
        assert all("could not be started in a process (exit status 1" in str(own.failure) for own in found)
    finally:
        processes.close()


def test_a_process_that_scores_imports_no_torch():
    code = "import sys, tezo.tasks.scoring_processes; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_an_object_cannot_be_called_in_other_processes():
    import tezo

    with pytest.raises(RequestError, match="reward_workers is 2"):
        tezo.train("nowhere", [{"prompt": "a"}], reward=by_row, reward_workers=2)


def test_async_functions_are_scored_where_a_loop_runs_already():
    async def later(prompt, completion, row):
        return float(len(completion))

    async def all_later(completions):
        return [float(len(text)) for text in completions]

    async def in_a_loop(function):
        return [own.value for own in scored(function, SAMPLES)]

    for function in (later, all_later):
        assert asyncio.run(in_a_loop(function)) == [float(len(sample.completion)) for sample in SAMPLES]
