"""Files of models, runs and recipes, changed at random: every command ends in a result, or in a sentence of its own."""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import label_rows, message_rows, model_folder, refused, settings, tezo, write_rows
from safetensors.torch import load_file, save_file
from short_runs import config, stopped

from tezo.runs.files import entry_of, write_manifest
from tezo.runs.folder import FILES

UNFORESEEN = "was not foreseen"
DEEP: Any = 0
for _ in range(400):
    DEEP = [DEEP]
VALUES = (
    None, True, 0, -1, 3, 10**9, 2**70, -(2**63), 0.5, 1e308, float("nan"), "", "x", "../x", "1" * 400, [], {}, [[]],
    ["x"], [None], {"x": {}}, {"x": [1]}, {"__type": "AddedToken", "content": 3}, DEEP, "{{ x.y.z }}", "{% raise %}",
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in pairs for place in [(value, key), *places(inner)]]


def changed_json(text: bytes, draw: random.Random) -> bytes:
    """A JSON text with another value, or none, in the place of one of its values; seldom of all."""
    root = [json.loads(text)]
    inside = places(root)
    container, key = draw.choice(inside if draw.random() < 0.95 else inside[:1])
    if draw.random() < 0.15 and container is not root:
        del container[key]
    else:
        container[key] = copy.deepcopy(draw.choice(VALUES))
    return json.dumps(root[0]).encode()


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes with some of them flipped, or the end cut off, or with something behind."""
    kind = draw.random()
    if kind < 0.15:
        return data[: draw.randrange(len(data) + 1)]
    if kind < 0.2:
        return data + draw.randbytes(7)
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 30])):
        changed[draw.randrange(min(len(data), draw.choice([64, 4096, len(data)])))] = draw.randrange(256)
    return bytes(changed)


def change(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    as_json = path.suffix == ".json" and draw.random() < 0.85
    path.write_bytes(changed_json(data, draw) if as_json else changed_bytes(data, draw))


def judge(done: Any, what: str, *, foreseen: bool = True) -> None:
    """The command ended in a result, or in words; `foreseen`: not in those for errors that nothing else catches."""
    said = f"{what}: {done.code} {done.err[-1500:]}"
    assert done.code in (0, 1, 2), said
    assert "Traceback" not in done.err and not (foreseen and UNFORESEEN in done.err), said
    if done.code:
        last = done.err.strip().splitlines()[-1]
        assert last.startswith("error: ") and len(last) < 1200, said


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models of each kind, rows, a run of a small method that ended, and one that was stopped with a checkpoint."""
    root = tmp_path_factory.mktemp("home")
    for family in ("opt", "llama", "roberta", "bert"):
        model_folder(root, family)
    model_folder(root, "opt", chat=True)
    write_rows(root / "rows.jsonl", label_rows(6))
    write_rows(root / "talks.jsonl", message_rows(4))
    flags = settings(method="tezo", method__rank=2, train__eval_every=1, train__log_every=1, train__batch_size=2)
    base = ("--model", root / "opt", "--data", root / "rows.jsonl", "--steps", 3, *flags)
    assert tezo("train", *base, "--output", root / "run").code == 0
    return root


MODELS = ("opt", "llama", "roberta", "bert", "opt-chat")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", MODELS)
def test_a_model_folder_that_was_changed_is_used_or_refused(home, tmp_path, family, seed):
    draw = random.Random(f"{family} {seed}")
    for number in range(30):
        folder = shutil.copytree(home / family, tmp_path / f"model-{number}")
        path = draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))
        change(path, draw)
        rows = home / ("talks.jsonl" if "chat" in family else "rows.jsonl")
        judge(tezo("eval", folder, "--data", rows), f"{family} {seed} {number} {path.name}")
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_folder_that_was_changed_is_used_or_refused(home, tmp_path, seed):
    draw = random.Random(seed)
    for number in range(15):
        run = shutil.copytree(home / "run", tmp_path / f"run-{number}")
        path = draw.choice(sorted(path for path in run.rglob("*") if path.is_file()))
        change(path, draw)
        if draw.random() < 0.5:  # somebody's own files have a manifest of their own
            write_manifest(run, FILES)
        for command in commands_over(home, run, tmp_path / f"out-{number}"):
            judge(tezo(*command), f"{seed} {number} {path.name} {command[0]}")
        shutil.rmtree(run)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(2))
def test_a_checkpoint_that_was_forged_is_used_or_refused(home, tmp_path, seed):
    draw = random.Random(seed)
    begun = tmp_path / "begun"
    for name in ("train", "dev", "test"):
        write_rows(home / f"{name}.jsonl", label_rows(6))
    stopped(config(home), begun, 6)
    for number in range(30):
        run = shutil.copytree(begun, tmp_path / f"run-{number}")
        folder = sorted(run.glob("checkpoint-*"))[-1]
        forge(folder, draw)
        # moments of another shape are found by the step that needs them, and so by the last net
        done = tezo("train", run / "config.yaml", "--output", run, "--resume")
        judge(done, f"{seed} {number}", foreseen=False)
        shutil.rmtree(run)


def forge(folder: Path, draw: random.Random) -> None:
    """A checkpoint with other content, and a manifest that agrees with it."""
    tensors = load_file(folder / "tensors.safetensors")
    name = draw.choice(sorted(tensors))
    value = tensors.pop(name)
    kind = draw.randrange(8)
    if kind == 0:
        tensors[draw.choice(["x", "run/x", "best/", "run/change/x", f"{name}/x"])] = value
    elif kind < 4:
        tensors[name] = draw.choice(
            [value.flatten(), value[None], value.flatten()[:0], value.int(), value.double(), value / 0]
        )
    elif kind > 4:
        tensors[name] = value
        (folder / "state.json").write_bytes(changed_json((folder / "state.json").read_bytes(), draw))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "tensors.safetensors")
    manifest = {file: entry_of(folder / file) for file in ("tensors.safetensors", "state.json")}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def commands_over(home: Path, run: Path, out: Path) -> list[tuple[Any, ...]]:
    return [
        ("report", run, "--output", f"{out}.html"),
        ("eval", run, "--data", home / "rows.jsonl"),
        ("predict", run, "--input", home / "rows.jsonl", "--output", f"{out}.jsonl"),
        ("export", run, "--output", f"{out}-lora"),
        ("replay", run, "--output", f"{out}-replay"),
        ("train", run / "config.yaml", "--output", run, "--resume"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_recipe_that_was_changed_is_used_or_refused(home, tmp_path, seed):
    draw = random.Random(seed)
    whole = (home / "run" / "config.yaml").read_bytes()
    for number in range(60):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_bytes(changed_bytes(whole, draw) if number % 2 else changed_yaml(whole, draw))
        judge(tezo("train", recipe, "--output", tmp_path / f"run-{number}", "--steps", 1), f"{seed} {number}")


def changed_yaml(text: bytes, draw: random.Random) -> bytes:
    root = changed_json(json.dumps(yaml.safe_load(text)).encode(), draw)
    try:
        return yaml.safe_dump(json.loads(root)).encode()
    except RecursionError:
        return root  # too deep for the writer here; JSON is YAML too, and the reader is what is tested


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 20_000, "a: !!timestamp x", "? [a]\n: b", "&a [*a]"], ids=len)
def test_deep_yaml_is_refused_as_a_recipe_and_as_a_setting(home, tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    refused(tezo("train", tmp_path / "recipe.yaml", "--output", tmp_path / "run"), "recipe.yaml")
    data = ("--model", home / "opt", "--data", home / "rows.jsonl", "--output", tmp_path / "run")
    refused(tezo("train", *data, "--set", f"method.rank={text}"), "method.rank")
