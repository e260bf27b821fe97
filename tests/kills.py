"""Kills a run again and again until it has ended, and compares it with one that was left alone.

    python tests/kills.py --kills 100 --methods lozo-m [--seed 0] [--json FILE]

Prints JSON, a list with one entry a method: kills, how many of them inside a save, the runs that went through them.
Each attempt is a fork of this process, which has torch loaded and has not computed with it.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from folders import label_rows, model_folder, write_rows

from tezo.methods import method
from tezo.runs import checkpoints as checkpoint
from tezo.runs import folder as run_folder
from tezo.runs import step_log as steplog
from tezo.runs.environment import hardware, versions
from tezo.system import files
from tezo.training.loop import train
from tezo.training.settings import Config, parse_config

OPERATIONS = ("open", "write", "fsync", "replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["lozo-m"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for name in arguments.methods:
        with tempfile.TemporaryDirectory() as folder:
            found.append(kill(Path(folder), arguments.kills, arguments.seed, name, arguments.lr))
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


def kill(folder: Path, wanted: int, seed: int, name: str, lr: float) -> dict[str, Any]:
    if os.fork() == 0:  # whose torch may compute
        model_folder(folder, "opt")
        for number, part in enumerate(("train", "dev", "test")):
            write_rows(folder / f"{part}.jsonl", label_rows(8, seed=number))
        os._exit(0)
    os.wait()
    draw, config = random.Random(seed), configuration(folder, name, lr)
    started = time.perf_counter()
    if attempt(config, folder / "undisturbed", None, None)[0] != 0:
        raise SystemExit("the undisturbed run failed: " + (folder / "stderr.txt").read_text())
    duration = time.perf_counter() - started
    kills = in_save = runs = 0
    while kills < wanted:
        run, runs = folder / f"run-{runs}", runs + 1
        while True:
            moment = (draw.randint(1, 25), None) if draw.random() < 0.5 else (None, draw.uniform(0, duration))
            code, saving = attempt(config, run, *moment)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                raise SystemExit(f"an attempt ended with {code}: " + (folder / "stderr.txt").read_text())
            kills, in_save = kills + 1, in_save + saving
        found, whole = contents(run), contents(folder / "undisturbed")
        differ = [name for name in found.keys() | whole.keys() if found.get(name, ...) != whole.get(name, ...)]
        if differ:
            raise SystemExit(f"{run} is not as the undisturbed run: {differ}")
    return {
        "method": name, "kills": kills, "in_save": in_save, "runs": runs, "steps_of_a_run": config.train.steps,
        "rollbacks": len(json.loads((folder / "undisturbed/summary.json").read_text())["rollbacks"]),
        "hardware": hardware(), "versions": versions(),
    }  # fmt: skip


def configuration(folder: Path, name: str, lr: float) -> Config:
    known = method(name).options()
    options = ({"rank": 4} if "rank" in known else {}) | ({"directions": "per-example"} if name == "tezo-cadam" else {})
    every = {"eval_every": 10, "checkpoint_every": 4, "log_every": 4}
    return parse_config(
        {
            "model": {"name": str(folder / "opt"), "device": "cpu"},
            "data": {name: str(folder / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": name, "lr": lr} | options,
            "train": {"steps": 40, "batch_size": 4, "guard": True} | every,
        }
    )


def attempt(config: Config, run: Path, operation: int | None, seconds: float | None) -> tuple[int, bool]:
    """(exit code, whether it died inside a save) of a process that is killed at that write, or after that time."""
    mark = run.parent / "saving"
    mark.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os._exit(_child(config, run, operation, mark))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), mark.exists()


def _child(config: Config, run: Path, operation: int | None, mark: Path) -> int:
    import torch

    torch.set_num_threads(1)
    sys.stderr = (run.parent / "stderr.txt").open("a")
    _watch(operation, mark)
    try:
        train(config, run, resume=True)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        return 1
    return 0


def _watch(operation: int | None, mark: Path) -> None:
    """Notes on disk while a checkpoint is being saved, and dies before or after the chosen one of the saves' writes."""
    count, saving, original = 0, False, checkpoint.save_checkpoint

    def save(*arguments: Any) -> Path:
        nonlocal saving
        mark.touch()
        saving = True
        path = original(*arguments)
        saving = False
        mark.unlink()
        return path

    run_folder.save_checkpoint = save

    class Dying:
        def __getattr__(self, name: str) -> Any:
            found = getattr(os, name)
            return call_of(found) if name in OPERATIONS and operation is not None and saving else found

    def call_of(found: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == operation and count % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = found(*arguments)
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    files.os = steplog.os = Dying()


def contents(run: Path) -> dict[str, Any]:
    """All of a finished run but for times, memory and what it was told at its start."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [
                {k: v for k, v in line.items() if k not in ("seconds", "memory", "elapsed", "passes", "crc")}
                for line in lines
            ]
        elif path.name == "summary.json":
            summary = json.loads(path.read_text())
            own = ("phases", "seconds_stepping", "seconds_on_basis", "peak_memory", "notices")
            found[name] = {k: v for k, v in summary.items() if k not in own}
        elif path.name == "manifest.json":
            entries = json.loads(path.read_text())["files"]
            found[name] = {k: v for k, v in entries.items() if k not in ("metrics.jsonl", "summary.json")}
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
