"""Short runs of every method, an end in the middle of one, and what a run left."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from folders import completion_rows, model_folder, write_rows
from safetensors.torch import load_file

from tezo.methods import METHODS
from tezo.runs.folder import LOG, METRICS, SCORED
from tezo.runs.step_log import MAGIC, read_log
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import Config, parse_config

STEPS = 9


def config(home: Path, method: str = "tezo-cadam", *, model: str = "opt", **train_settings: Any) -> Config:
    if method in METHODS and METHODS[method].takes_answers:
        return config_of_answers(home, method, **train_settings)
    options = dict(CASES[method].options) if method in CASES else {}
    defaults = METHODS[method].defaults() if method in METHODS else {}
    if method in METHODS and METHODS[method].takes_outputs:  # of so few rows it learns nothing, and would end early
        train_settings = {"guard": False} | train_settings
    options |= {"lazy_update_interval": 4} if defaults.get("lazy_update_interval") else {}
    return parse_config(
        {
            "model": {"name": str(home / model), "device": "cpu"},
            "data": {name: str(home / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": method, "lr": 3e-3, **options},
            "train": {"steps": STEPS, "batch_size": 4, "eval_every": 2, "log_every": 2, "schedule": "linear",
                      "checkpoint_every": 3, "feedback_first": 0, "feedback_last": 0} | train_settings,
        }
    )  # fmt: skip


SCORER = """
def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion)
"""


def config_of_answers(home: Path, method: str, **train_settings: Any) -> Config:
    """A short run that learns a reward, on prompts and a decoder of its own."""
    own = home / "answers"
    if not own.exists():
        own.mkdir()
        model_folder(own, "llama")
        for seed, name in enumerate(("train", "dev", "test")):
            rows = [{"prompt": row["prompt"]} for row in completion_rows(10, seed)]
            write_rows(own / f"{name}.jsonl", rows)
        (own / "score.py").write_text(SCORER)
    # so few steps leave the greedy answers as they are, and keep_best would keep step 0
    return parse_config(
        {
            "model": {"name": str(own / "llama"), "device": "cpu"},
            "data": {name: str(own / f"{name}.jsonl") for name in ("train", "dev", "test")},
            "method": {"name": method, "rank": 4},
            "train": {"steps": STEPS, "batch_size": 4, "eval_every": 2, "log_every": 2, "checkpoint_every": 3,
                      "reward": f"{own / 'score.py'}:vowels", "max_new_tokens": 5,
                      "keep_best": False} | train_settings,
        }
    )  # fmt: skip


class Death(Listener):
    """Ends the process's part of a run in the worst way that one process can: by an error nobody foresees."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, progress: Any) -> None:
        if progress.record.step == self.step:
            raise KeyboardInterrupt


def stopped(made: Config, run: Path, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(made, run, [Death(step)], resume=True)


def entries(log: bytes) -> list[int]:
    """Where the header of a step log ends, and each of its entries."""
    ends = [len(MAGIC) + 8 + struct.unpack_from("<I", log, len(MAGIC))[0]]
    while ends[-1] < len(log):
        ends.append(ends[-1] + 12 + struct.unpack_from("<4sI", log, ends[-1])[1])
    return ends


def killed_after(whole: Path, run: Path, count: int) -> None:
    """Makes of a finished run the folder of one whose process was killed after so many entries of its log."""
    run.mkdir()
    log = (whole / LOG).read_bytes()
    (run / LOG).write_bytes(log[: entries(log)[count]])
    known = read_log(run / LOG)
    for name in known.files:
        shutil.copy(whole / name, run / name)
    for name in (METRICS, SCORED):
        for text in (whole / name).read_text().splitlines(keepends=True) if (whole / name).exists() else ():
            line = json.loads(text)
            there = (line["split"], line["step"]) in known.evaluations if "split" in line else True
            if there and line["step"] <= len(known.steps):
                with (run / name).open("a") as file:
                    file.write(text)


def result(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("[am]*/*model.safetensors")))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
