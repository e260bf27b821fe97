"""Counts the files, functions and frames of `src/tezo` that a warm step passes through.

    python benchmarks/step_walk.py [METHOD ...]             from `optimizer.step` on, with a bare closure
    python benchmarks/step_walk.py --run MODEL [METHOD ...]  from the loop of a run on, on rows of examples

Without --run each method takes three steps on a small OPT with random weights, and the fourth is counted. With --run
the last step of a run is counted, without the evaluation after it: a round of gauss-newton with its default settings,
or the last of a few steps of another method. MODEL is a folder or an embedded model.

The depth is the largest number of frames of this library on the stack at once. The depth of a pass is the number of
frames of this library from the estimator to the model. Frames of torch and of the model are not counted. With -v the
files are named.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

import tezo
from tezo.training.listeners import Listener, Progress

SOURCE = str(Path(tezo.__file__).parent)
EXAMPLES = Path(__file__).parent.parent / "examples"
ESTIMATORS = ("optim/estimators", "newton/step.py")
"""Where the frame of an estimator lies."""
RUNS: dict[str, dict[str, Any]] = {
    "gauss-newton": {},
    "es": {"steps": 3, "batch_size": 2, "lr": 1e-3, "num_directions": 4, "max_new_tokens": 4},
}
"""Settings of the runs; other methods take six steps of eight rows."""


@dataclass
class Walk:
    """What was passed through."""

    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    deepest: int = 0
    """Most frames of this library on the stack at once."""
    pass_depth: int = 0
    """Most frames of this library from an estimator's, which counts, to the model."""


class Walker:
    """Counts calls between `start` and `stop`."""

    def __init__(self) -> None:
        self.walk = Walk()
        self._stack: list[str] = []

    def start(self) -> None:
        """Begins to count."""
        sys.setprofile(self._see)

    def stop(self) -> None:
        """Ends it."""
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        name, code = frame.f_code.co_filename, frame.f_code
        if event == "call" and code.co_name == "forward" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            self._pass()
        if not name.startswith(SOURCE):
            return
        if event == "call":
            self._stack.append(name[len(SOURCE) + 1 :])
            self.walk.deepest = max(self.walk.deepest, len(self._stack))
            self.walk.files.add(self._stack[-1])
            self.walk.functions.add((name, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))
        elif event == "return" and self._stack:
            self._stack.pop()

    def _pass(self) -> None:
        within = [i for i, name in enumerate(self._stack) if name.startswith(ESTIMATORS)]
        if within:
            self.walk.pass_depth = max(self.walk.pass_depth, len(self._stack) - within[-1])


@contextmanager
def walked() -> Iterator[Walk]:
    """Counts the calls while it is open."""
    walker = Walker()
    walker.start()
    try:
        yield walker.walk
    finally:
        walker.stop()


class LastStep(Listener):
    """Counts each step of a run but the first, and keeps the last one that was finished."""

    walk = Walk()

    def __init__(self) -> None:
        self._walker = Walker()

    def stepping(self, step: int) -> None:
        if step:
            self._walker = Walker()
            self._walker.start()

    def stepped(self, progress: Progress) -> None:
        if progress.record.step:
            self._walker.stop()
            self.walk = self._walker.walk


def length(sample: dict[str, Any]) -> float:
    """A reward for the run of es."""
    return float(len(sample["completion"]))


def walk_of_run(name: str, model: str) -> Walk:
    """Returns the walk of the last step of a run of a method."""
    listener = LastStep()
    rewarded = name == "es"
    rows = EXAMPLES / ("reward" if rewarded else "issues")
    with tempfile.TemporaryDirectory() as folder:
        tezo.train(
            model,
            str(rows / "train.jsonl"),
            dev=str(rows / "dev.jsonl"),
            test=str(rows / "dev.jsonl"),
            method=name,
            output=f"{folder}/run",
            listeners=[listener],
            progress=False,
            reward=length if rewarded else None,
            **RUNS.get(name, {"steps": 6, "batch_size": 8, "lr": 1e-6}),
        )
    return listener.walk


def walk_of(name: str) -> Walk:
    """The walk of a warm step of a method."""
    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=64,
            word_embed_proj_dim=32,
        )
    ).eval()
    batch = {"input_ids": torch.arange(32).view(2, 16)}
    batch["labels"] = batch["input_ids"]
    build: Callable[..., Any] = tezo.METHODS[name].build
    optimizer = build(model, lr=1e-6)
    closure = tezo.closure(model, batch)
    for _ in range(3):
        optimizer.step(closure)
    with walked() as walk:
        optimizer.step(closure)
    return walk


def main() -> None:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--run", metavar="MODEL", help="count the last step of a run of this model")
    parser.add_argument("-v", action="store_true", help="name the files")
    args = parser.parse_args()
    for name in args.methods or (["gauss-newton", "tezo", "es"] if args.run else tezo.METHODS):
        walk = walk_of_run(name, args.run) if args.run else walk_of(name)
        print(
            f"{name:<18} {len(walk.files):>3} files {len(walk.functions):>4} functions {walk.deepest:>3} deep"
            f" {walk.pass_depth:>3} frames from the estimator to the model"
        )
        if args.v:
            print("  " + "\n  ".join(sorted(walk.files)))


if __name__ == "__main__":
    main()
