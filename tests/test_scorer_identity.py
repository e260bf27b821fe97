"""The identity of a scorer: equal for scorers that compute the same, whatever their place, and for no others."""

import functools
import itertools
import operator
import re
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from tezo.tasks.scorer_identity import difference, identity_of, identity_of_file
from tezo.tasks.scorers import load_score

BEFORE = """
import functools, math, re
import helper
from helper import length

WORDS = {"good", "bad", "fine", "new", "old"}
WEIGHTS = {"form": 1.0, "length": 0.5}
PATTERN = re.compile("good|bad")

def other(text):
    return len(text)

def plain(prompt, completion, row, most=4):
    if completion in {"a", "b", "c", "d"}:
        return math.sqrt(4)
    try:
        return other(completion) + most + len(WORDS)
    except ValueError:
        return WEIGHTS["form"]

def of_module(prompt, completion, row):
    return helper.score(completion) + length(completion)

def matched(prompt, completion, row):
    return len(PATTERN.findall(completion))

def made(weight):
    def inner(prompt, completion, row):
        return weight * len(completion)
    return inner

closed = made(2.0)
negative = lambda prompt, completion, row: -len(completion)
filled = functools.partial(plain, most=5)
nested = lambda p, c, r: sum(len(w) for w in c.split() if w != "a")

class Judge:
    factor = 3

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, prompt, completion, row):
        return self.weight * self.factor * self.of(completion)

    def of(self, text):
        return len(text)

judge = Judge(2)
bound = Judge(2).__call__
cached = functools.cache(other)
remembers = lambda p, c, r: cached(c)

async def later(prompt, completion, row):
    return len(completion)

def decorated(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments) + 1
    return call

@decorated
def wrapped(prompt, completion, row):
    return len(completion)

class Sub(Judge):
    pass

sub = Sub(1)
several = (plain, negative)
"""
HELPER = "FACTOR = 2\n\ndef score(text):\n    return FACTOR * length(text)\n\ndef length(text):\n    return len(text)\n"

SCORERS = [
    "plain", "of_module", "matched", "closed", "negative", "filled", "nested", "judge", "bound", "remembers", "later",
    "wrapped", "sub", "several",
]  # fmt: skip

CHANGES = [
    ("plain", "math.sqrt(4)", "math.sqrt(9)"),
    ("plain", '"a", "b", "c", "d"', '"a", "b", "c"'),
    ("plain", "most=4", "most=5"),
    ("plain", "return len(text)\n\ndef plain", "return -len(text)\n\ndef plain"),
    ("plain", '"old"}', '"old", "dirty"}'),
    ("plain", "except ValueError", "except TypeError"),
    ("plain", '"form": 1.0', '"form": 2.0'),
    ("plain", "other(completion) + most", "other(completion) - most"),
    ("plain", "def plain(prompt, completion, row", "def plain(completion, prompt, row"),
    ("matched", '"good|bad"', '"good"'),
    ("closed", "made(2.0)", "made(-2.0)"),
    ("closed", "weight * len", "weight + len"),
    ("negative", "row: -len", "row: len"),
    ("filled", "most=5", "most=6"),
    ("filled", "functools.partial(plain", "functools.partial(matched"),
    ("nested", 'w != "a"', 'w == "a"'),
    ("judge", "Judge(2)", "Judge(3)"),
    ("judge", "factor = 3", "factor = 4"),
    ("judge", "return len(text)\n\njudge", "return -len(text)\n\njudge"),
    ("bound", "Judge(2)", "Judge(-2)"),
    ("remembers", "return len(text)\n\ndef plain", "return -len(text)\n\ndef plain"),
    ("later", "return len(completion)\n\ndef decorated", "return -len(completion)\n\ndef decorated"),
    ("wrapped", "+ 1", "+ 2"),
    ("wrapped", "return len(completion)\n\nclass Sub", "return -len(completion)\n\nclass Sub"),
    ("sub", "factor = 3", "factor = 4"),
    ("sub", "    pass", "    factor = 5"),
    ("several", "row: -len", "row: len"),
    ("several", "(plain, negative)", "(negative, plain)"),
]
CHANGES_OF_HELPER = [
    ("FACTOR = 2", "FACTOR = 3"),
    ("FACTOR * length", "FACTOR - length"),
    ("return len(text)", "return -len(text)"),
]


def differ(before, now):
    return difference(before.to_json(), now.to_json())


def parts(tmp_path, source=BEFORE, name="plain", helper=HELPER, file="own.py"):
    """The identity of a scorer of a script that ran as in a notebook: its functions are of no module with a file."""
    (tmp_path / "helper.py").write_text(helper)
    sys.modules.pop("helper", None)
    sys.path.insert(0, str(tmp_path))
    try:
        space = {"__name__": "a_notebook"}
        exec(compile(source, file, "exec"), space)
        return identity_of(space[name])
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_that_was_defined_again_elsewhere_is_the_same(tmp_path, name):
    before = parts(tmp_path, name=name)
    moved = "# a comment\n" * 7 + BEFORE.replace("def other", "# more\ndef other").replace(
        "async def later(prompt, completion, row):", 'async def later(prompt, completion, row):\n    """Says it."""'
    )
    for again in (parts(tmp_path, name=name, file="/other/place.py"), parts(tmp_path, moved, name)):
        assert differ(before, again) is None
    assert before.unknown == {}


@pytest.mark.parametrize(("name", "old", "new"), CHANGES)
def test_a_scorer_that_computes_otherwise_is_another(tmp_path, name, old, new):
    assert BEFORE.count(old) >= 1
    assert differ(parts(tmp_path, name=name), parts(tmp_path, BEFORE.replace(old, new), name)) is not None


@pytest.mark.parametrize(("old", "new"), CHANGES_OF_HELPER)
def test_a_scorer_whose_helper_in_another_file_computes_otherwise_is_another(tmp_path, old, new):
    before = parts(tmp_path, name="of_module")
    assert differ(before, parts(tmp_path, name="of_module", helper=HELPER.replace(old, new))) is not None
    same = parts(tmp_path, name="of_module", helper="# a comment\n" + HELPER + "\ndef unused(): return 1\n")
    assert differ(before, same) is None


def test_the_parts_are_the_same_in_every_process(tmp_path):
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "own.py").write_text(BEFORE)
    code = (
        "import own; from tezo.tasks.scorer_identity import identity_of; "
        f"print([identity_of(getattr(own, name)).parts for name in {SCORERS}])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(found) == 1


def holding(value):
    return lambda *_: value


@pytest.mark.parametrize(
    ("scorer", "part"),
    [
        (len, "its code"),
        (operator.itemgetter("score"), "its object"),
        (functools.partial(len), None),
        (holding(itertools.count()), "its variable value"),
        (holding(threading.Lock()), "its variable value"),
        (holding(range), None),
    ],
    ids=["builtin", "itemgetter", "partial of a builtin", "iterator", "lock", "class"],
)
def test_what_cannot_be_compared_is_named(scorer, part):
    assert list(identity_of(scorer).unknown) == ([] if part is None else [part])


def test_what_calls_change_is_state_and_is_not_compared():
    calls, weights = [], {"form": 1.0}

    def noted(prompt, completion, row):
        calls.append(completion)
        return weights["form"]

    before = identity_of(noted)
    noted("", "text", {})
    settled = before.settled(identity_of(noted))
    assert settled.unknown == {"its variable calls": "its calls change it"}
    noted("", "text", {})
    assert differ(settled, identity_of(noted)) is None
    weights["form"] = 2.0
    assert differ(settled, identity_of(noted)) == "its variable weights"


def test_values_of_all_kinds_are_compared():
    import numpy
    import torch

    @dataclass
    class Setting:
        weight: float = 1.0
        words: tuple = ("a",)

    for first, same, other in (
        (numpy.arange(3), numpy.arange(3), numpy.arange(3.0)),
        (torch.ones(2), torch.ones(2), torch.zeros(2)),
        (Setting(), Setting(), Setting(2.0)),
        ({"b": 1, "a": [2]}, {"a": [2], "b": 1}, {"a": [3], "b": 1}),
        (re.compile("a"), re.compile("a"), re.compile("a", re.IGNORECASE)),
        (1, 1, True),
        (10**5000, 10**5000, 10**5000 + 1),
    ):
        assert identity_of(holding(first)).unknown == {}, first
        assert differ(identity_of(holding(first)), identity_of(holding(same))) is None
        assert differ(identity_of(holding(first)), identity_of(holding(other))) is not None
    loop = []
    loop.append(loop)
    assert differ(identity_of(holding(loop)), identity_of(holding(loop))) is None


def test_what_no_identity_is_differs():
    for before in (None, "0" * 64, {"parts": 3}, {"parts": {}, "unknown": []}):
        assert difference(before, identity_of(len).to_json()) is not None


def test_a_module_of_the_users_whose_code_raises_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/__init__.py").write_text("class Odd(None): pass")
    scorer = tmp_path / "score.py"
    scorer.write_text("try:\n    import odd.part\nexcept TypeError:\n    pass\ndef f(row): return 1.0")
    assert "its file" in identity_of_file(scorer, "f").parts


def test_a_file_is_known_by_its_source_and_by_the_modules_that_it_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deeper.py").write_text("def deep(): return 1\n")
    (tmp_path / "beside_it.py").write_text("def length(text):\n    from deeper import deep\n    return deep()\n")
    file = tmp_path / "score.py"
    file.write_text('"""Scores."""\nfrom beside_it import length\n\ndef f(p, c, r):\n    return length(c)  # it\n')
    _, before = load_score(f"{file}:f")
    assert list(before.parts) == ["its function", "its file", "module beside_it", "module deeper"]
    file.write_text("from beside_it import length\n# more\ndef f(p, c, r):\n    return length( c )\n")
    assert differ(before, identity_of_file(file, "f")) is None
    for path, text in ((file, "def f(p, c, r): return 2"), (tmp_path / "deeper.py", "def deep(): return 2")):
        kept = path.read_text()
        path.write_text(text)
        assert differ(before, identity_of_file(file, "f")) is not None
        path.write_text(kept)
