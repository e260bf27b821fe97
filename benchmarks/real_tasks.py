"""What methods learn of labelled rows with the embedded language model (135M parameters), beside LoRA.

    python benchmarks/real_tasks.py --shared FOLDER [--out benchmarks/results] [--only WORD ...] [--threads 1]

Rows of SST-2 under 110 characters with the task's own prompt, and questions of TREC with the kind of their answer. Each
run is `tezo train` with a seed: test rows before and after, of the untuned model with a bias for each label and under a
linear probe, and all passes but evaluations, in passes of 64 rows, from the start of the run. LoRA has gradients.
Writes real_tasks.json after each run, and leaves out runs that it has; `--only` names runs by parts of their names.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tezo_studies.bench.result_files import commit

from tezo.runs.environment import hardware, versions
from tezo.system.progress import AFTER, BEFORE, BETWEEN
from tezo.training.config import read_config
from tezo.training.loop import train

MODEL = "embedded:smollm2-135m"
ROWS_OF_A_PASS = 64
KINDS = ("abbreviation", "entity", "description", "person", "place", "number")


def sst2(shared: Path, folder: Path) -> list[tuple[str, Any]]:
    """Settings of the rows of SST-2."""
    (folder / "sst2").mkdir()
    for part, longest in (("train", 110), ("validation", 130)):
        rows = map(json.loads, (shared / f"data/sst2/{part}.jsonl").read_text(encoding="utf-8").splitlines())
        every = [*rows]
        if part == "validation":
            random.Random(2).shuffle(every)
        short = [row for row in every if len(row["sentence"]) < longest]
        if part == "validation":
            short = short[:256]
        (folder / f"sst2/{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short), encoding="utf-8")
    counts = {"data.num_train": 434, "data.num_dev": 128, "data.num_test": 256}
    return [("data.task", "sst2"), ("data.dir", str(folder)), *counts.items()]


def trec(shared: Path, folder: Path) -> list[tuple[str, Any]]:
    """Settings of the rows of TREC."""
    for part, count in (("train", 1000), ("validation", 400)):
        rows = map(json.loads, (shared / f"data/trec/{part}.jsonl").read_text(encoding="utf-8").splitlines())
        texts = [
            {"text": f"Question: {row['text']}\nThe answer is a", "label": KINDS[row["coarse_label"]]} for row in rows
        ][:count]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    files = {"data.train": folder / "train.jsonl", "data.test": folder / "validation.jsonl"}
    return [*((key, str(path)) for key, path in files.items()), ("data.num_dev", 128)]


TASKS: dict[str, Callable[[Path, Path], list[tuple[str, Any]]]] = {"sst2": sst2, "trec": trec}


def runs() -> dict[str, tuple[str, list[tuple[str, Any]]]]:
    """Name of each run -> (task, its settings)."""
    found: dict[str, tuple[str, list[tuple[str, Any]]]] = {}
    searched: list[tuple[str, Any]] = [("method.lr", "auto"), ("method.rho", "auto"), ("train.batch_size", 64)]
    for task, rounds in (("sst2", (2, 5)), ("trec", (1, 2))):
        for steps in rounds:
            for seed in (0, 1, 2):
                own = [("method.name", "gauss-newton"), ("train.steps", steps), ("train.seed", seed)]
                found[f"{task}/gauss-newton, {steps} rounds, seed {seed}"] = task, own
        for lr in (2e-4, 5e-4, 1e-3):
            own = [("method.name", "adam"), ("method.lr", lr), ("model.peft", "lora"), ("train.steps", 120)]
            found[f"{task}/LoRA with gradients, lr {lr:g}, seed 0"] = task, [*own, ("train.seed", 0)]
        found[f"{task}/head-feedback, seed 0"] = task, [("method.name", "head-feedback"), ("train.seed", 0)]
        for name in ("tezo", "tezo-adam", "lozo", "mezo"):
            found[f"{task}/{name}, seed 0"] = task, [("method.name", name), ("train.steps", 64), *searched]
        for lr in (3e-6, 3e-5):  # nine passes a step; no search is defined for it
            own = [("method.name", "fzoo"), ("method.lr", lr), ("train.steps", 14), ("train.batch_size", 64)]
            found[f"{task}/fzoo, lr {lr:g}, seed 0"] = task, own
    return found


def measured(settings: list[tuple[str, Any]]) -> dict[str, Any]:
    """One run: what it came to."""
    with tempfile.TemporaryDirectory() as folder:
        summary = train(read_config(None, settings), Path(folder) / "run", [])
        batch_size = read_config(Path(folder) / "run/config.yaml", []).train.batch_size
    passes = sum(spent["passes"] for name, spent in summary["phases"].items() if name not in (BEFORE, BETWEEN, AFTER))
    keys = ("before", "after", "untuned", "dev_loss_before", "dev_loss", "kept_step", "steps", "rows")
    found = {key: summary[key] for key in keys}
    return found | {"batch_size": batch_size, "passes_of_64_rows": round(passes * batch_size / ROWS_OF_A_PASS, 1)}


def main() -> None:
    """Makes the runs that are missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    path = chosen.out / "real_tasks.json"
    for name, (task, own) in runs().items():
        done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if name in done.get("runs", {}) or not all(word in name for word in chosen.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measured([("model.name", MODEL), *TASKS[task](chosen.shared, Path(folder)), *own])
        done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": {}}
        done["runs"][name] = found
        about = {"model": MODEL, "hardware": hardware(), "versions": versions(), "commit": commit()}
        path.write_text(json.dumps(about | {"runs": done["runs"]}, indent=1) + "\n", encoding="utf-8")
        print(name, found["after"], flush=True)


if __name__ == "__main__":
    main()
