"""What methods learn of real rows with the embedded language model (135M parameters), beside LoRA with gradients.

    python benchmarks/real_tasks.py --shared FOLDER [--out benchmarks/results] [--device cpu] [--workers 1]
        [--only WORD ...] [--without WORD ...] [--seconds 3600]

Tasks: SST-2 (rows under 110 characters), RTE and BoolQ (passages under 600) with their own prompts, questions of TREC
with the kind of their answer, titles of examples/issues and messages of examples/routing with their labels, and free
text (`completions`). Each run is `tezo train` with a seed, in float32: test rows before and after, of the untuned model
with a bias for each label and under a linear probe; the dev loss after so many passes; and all passes but evaluations,
in passes of 64 rows, from the start of the run. LoRA has gradients. Writes real_tasks.json after each run and leaves
out runs that it has; `--only` and `--without` name runs by parts of their names. No run begins after `--seconds`.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.result_files import commit

from tezo.runs.environment import hardware, versions
from tezo.system.errors import TezoError
from tezo.system.progress import AFTER, BEFORE, BETWEEN, current, quiet_libraries
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import read_config

MODEL = "embedded:smollm2-135m"
ROWS_OF_A_PASS = 64
KINDS = ("abbreviation", "entity", "description", "person", "place", "number")
Settings = list[tuple[str, Any]]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A file of these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sst2(shared: Path, folder: Path) -> Settings:
    """Settings of the rows of SST-2."""
    for part, longest in (("train", 110), ("validation", 130)):
        every = read(shared / f"data/sst2/{part}.jsonl")
        if part == "validation":
            random.Random(2).shuffle(every)
        short = [row for row in every if len(row["sentence"]) < longest]
        write(folder / f"sst2/{part}.jsonl", short[:256] if part == "validation" else short)
    counts = {"data.num_train": 434, "data.num_dev": 128, "data.num_test": 256}
    return [("data.task", "sst2"), ("data.dir", str(folder)), *counts.items()]


def rte(shared: Path, folder: Path) -> Settings:
    """Settings of the rows of RTE: all 277 of its validation set are test rows."""
    del folder
    counts = {"data.num_train": 872, "data.num_dev": 128, "data.num_test": 277}
    return [("data.task", "rte"), ("data.dir", str(shared / "data")), *counts.items()]


def boolq(shared: Path, folder: Path) -> Settings:
    """Settings of the rows of BoolQ."""
    sizes = {}
    for part in ("train", "validation"):
        short = [row for row in read(shared / f"data/boolq/{part}.jsonl") if len(row["passage"]) < 600]
        write(folder / f"boolq/{part}.jsonl", short)
        sizes[part] = len(short)
    counts = {
        "data.num_train": sizes["train"] - 128,
        "data.num_dev": 128,
        "data.num_test": min(256, sizes["validation"]),
    }
    return [("data.task", "boolq"), ("data.dir", str(folder)), *counts.items()]


def trec(shared: Path, folder: Path) -> Settings:
    """Settings of the rows of TREC."""
    for part, count in (("train", 1000), ("validation", 400)):
        texts = [
            {"text": f"Question: {row['text']}\nThe answer is a", "label": KINDS[row["coarse_label"]]}
            for row in read(shared / f"data/trec/{part}.jsonl")
        ]
        write(folder / f"{part}.jsonl", texts[:count])
    files = {"data.train": folder / "train.jsonl", "data.test": folder / "validation.jsonl"}
    return [*((key, str(path)) for key, path in files.items()), ("data.num_dev", 128)]


def routing(shared: Path, folder: Path) -> Settings:
    """Settings of the messages of examples/routing."""
    del shared
    for part in ("train", "dev", "test"):
        rows = read(Path(__file__).parents[1] / f"examples/routing/{part}.jsonl")
        write(folder / f"{part}.jsonl", [row | {"text": f"Message: {row['text']}\nQueue:"} for row in rows])
    return [(f"data.{part}", str(folder / f"{part}.jsonl")) for part in ("train", "dev", "test")]


def issues(shared: Path, folder: Path) -> Settings:
    """Settings of the titles of examples/issues, as `make demo` has them."""
    del shared, folder
    home = Path(__file__).parents[1] / "examples/issues"
    return [(f"data.{part}", str(home / f"{part}.jsonl")) for part in ("train", "dev", "test")]


def completions(shared: Path, folder: Path) -> Settings:
    """Settings of free text: sentences that follow from others."""
    del folder
    return [(f"data.{part}", str(shared / f"data/completions/{part}.jsonl")) for part in ("train", "dev", "test")]


TASKS: dict[str, Callable[[Path, Path], Settings]] = {
    "issues": issues, "sst2": sst2, "trec": trec, "routing": routing, "rte": rte, "boolq": boolq,
    "completions": completions,
}  # fmt: skip
SEEDS = (0, 1, 2)
LORA_RATES = (2e-4, 5e-4, 1e-3)
FZOO_RATES = (3e-5, 3e-4, 3e-3, 3e-2)


def runs() -> Iterator[tuple[str, str, Settings]]:
    """(name of each run, task, its settings), the most telling first."""

    def of_seeds(method: str, label: str, *more: tuple[str, Any], seeds: tuple[int, ...] = SEEDS) -> Iterator[Any]:
        for seed in seeds:
            for task in TASKS:
                own = [("method.name", method), ("train.seed", seed), *more]
                yield f"{task}/{label}, seed {seed}", task, own

    searched = ("method.lr", "auto"), ("method.rho", "auto"), ("train.batch_size", 64), ("train.steps", 64)
    yield from of_seeds("gauss-newton", "gauss-newton")
    for lr in LORA_RATES:
        own = ("method.lr", lr), ("model.peft", "lora"), ("train.steps", 120)
        yield from of_seeds("adam", f"LoRA with gradients, lr {lr:g}", *own, seeds=(0,))
    yield from of_seeds("head-feedback", "head-feedback", seeds=(0,))
    yield from of_seeds("tezo", "tezo", *searched, seeds=(0,))
    yield from of_seeds("lozo", "lozo", *searched, seeds=(0,))
    for lr in FZOO_RATES:  # nine passes a step; no search is defined for it
        own = ("method.lr", lr), ("train.steps", 14), ("train.batch_size", 64)
        yield from of_seeds("fzoo", f"fzoo, lr {lr:g}", *own, seeds=(0,))
    for name in ("tezo-adam", "mezo", "grzo"):
        yield from of_seeds(name, name, *searched, seeds=(0,))


class Curve(Listener):
    """The dev loss after so many passes: [passes of a batch, loss] at each evaluation."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def evaluated(self, split: str, step: int, metrics: Any) -> None:
        del step
        if split == "dev":
            self.points.append((spent(current().phases), metrics["loss"]))


def spent(phases: dict[str, dict[str, float]]) -> float:
    """All forward passes but those of evaluations."""
    return sum(own["passes"] for phase, own in phases.items() if phase not in (BEFORE, BETWEEN, AFTER))


def measured(given: tuple[str, str, Settings, argparse.Namespace]) -> tuple[str, dict[str, Any]]:
    """One run: its name, and what it came to. In a process of a pool."""
    name, task, own, chosen = given
    if time.time() > chosen.until:
        return name, {"error": "no time is left"}
    torch.set_num_threads(chosen.threads)
    quiet_libraries()
    common = [("model.name", chosen.model), ("model.device", chosen.device), ("model.dtype", "float32")]
    begun, curve = time.monotonic(), Curve()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = TASKS[task](chosen.shared, Path(folder))
            summary = train(read_config(None, [*common, *rows, *own]), Path(folder) / "run", [curve])
            batch_size = read_config(Path(folder) / "run/config.yaml", []).train.batch_size
    except (TezoError, RuntimeError) as error:  # one that does not fit leaves the others
        traceback.print_exc()
        return name, {"error": f"{type(error).__name__}: {error}"}
    share = batch_size / ROWS_OF_A_PASS
    keys = ("before", "after", "untuned", "dev_loss_before", "dev_loss", "kept_step", "steps", "rows")
    found = {key: summary[key] for key in keys}
    found |= {"batch_size": batch_size, "passes_of_64_rows": round(spent(summary["phases"]) * share, 1)}
    found["curve"] = [(round(passes * share, 1), round(loss, 4)) for passes, loss in curve.points]
    on_gpu = chosen.device.startswith("cuda")
    machine = torch.cuda.get_device_name(chosen.device) if on_gpu else hardware()
    about = {"hardware": machine, "versions": versions(), "commit": commit()}
    return name, found | {"seconds": round(time.monotonic() - begun, 1)} | about


def options(about: str | None) -> argparse.ArgumentParser:
    """What all programs of such runs are told."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--model", default=MODEL, help="another model rehearses the runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    return parser


def make(
    file: str, run: Callable[[Any], tuple[str, dict[str, Any]]], every: list[Any], chosen: argparse.Namespace
) -> None:
    """Makes the runs that a file lacks, each in a process of its own; `every` is what each is given, its name first."""
    chosen.until = time.time() + chosen.seconds
    path = chosen.out / file
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"model": chosen.model, "runs": {}}
    order = [name for name, *_ in every]
    left = [
        (*own, chosen)
        for own in every
        if own[0] not in done["runs"]
        and all(word in own[0] for word in chosen.only)
        and not any(word in own[0] for word in chosen.without)
    ]
    with multiprocessing.get_context("spawn").Pool(chosen.workers, maxtasksperchild=1) as pool:
        for name, found in pool.imap_unordered(run, left, chunksize=1):
            print(f"{name}: {found.get('error') or (found['seconds'], found['after'])}", flush=True)
            if "error" not in found:
                done["runs"] = dict(sorted({**done["runs"], name: found}.items(), key=lambda own: order.index(own[0])))
                path.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make("real_tasks.json", measured, list(runs()), options(__doc__).parse_args())
