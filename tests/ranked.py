"""What a rank of tests/test_ranks.py does: `train`, with a fault on one rank where one is asked for.

torchrun ... tests/ranked.py RECIPE RUN [--set KEY=VALUE] [--resume] [--die | --drift | --term | --flat RANK STEP]
                             [--set-on RANK KEY=VALUE] [--folder-of RANK FOLDER] [--rate-of RANK RATE] [--late RANK]
                             [--patience SECONDS]
"""

import argparse
import dataclasses
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tezo.system import processes as distributed
from tezo.system.errors import RunInterrupted, TezoError
from tezo.training import choices as resolution
from tezo.training import loop
from tezo.training.listeners import Listener
from tezo.training.loop import train
from tezo.training.settings import parse_setting, read_config

KINDS = ("die", "drift", "term", "flat")


class Fault(Listener):
    def __init__(self, kind: str, rank: int, step: int) -> None:
        self.kind, self.step, self.mine = kind, step, int(os.environ["RANK"]) == rank
        self.job: Any = None

    def started(self, job: Any) -> None:
        self.job = job
        if self.kind == "flat" and self.mine:
            flatten(job.optimizer.targets[0].sites[0].module)

    def stepping(self, step: int) -> None:
        if not self.mine or step != self.step or self.kind == "flat":
            return
        if self.kind == "drift":
            next(iter(self.job.optimizer.resumable_state().values())).view(-1)[0] += 1e-3
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "die" else signal.SIGTERM)


def flatten(module: torch.nn.Module) -> None:
    """Has a linear module compute all rows as one, so that those of two models in a pass cannot be told apart."""
    shapes = []

    def before(_: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        shapes.append(args[0].shape[:-1])
        return (args[0].reshape(1, -1, args[0].shape[-1]),)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(lambda *found: found[-1].view(*shapes.pop(), module.weight.shape[0]))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, nargs=2)
    for name in ("--set-on", "--folder-of"):
        parser.add_argument(name, nargs=2, action="append", default=[])
    parser.add_argument("--rate-of", nargs=2)
    parser.add_argument("--late", type=int)
    parser.add_argument("--patience", type=float)
    parser.add_argument("--compare-every", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    if rank == str(asked.late):
        return 2
    loop.COMPARE_EVERY = asked.compare_every
    if asked.patience:
        distributed.PATIENCE = timedelta(seconds=asked.patience)
    for own, folder in asked.folder_of:
        if own == rank:
            os.chdir(folder)
    if asked.rate_of and asked.rate_of[0] == rank:
        choose = resolution.choose_lr
        resolution.choose_lr = lambda *given: dataclasses.replace(choose(*given), lr=float(asked.rate_of[1]))
    asked.set += [text for own, text in asked.set_on if own == rank]
    found = {kind: getattr(asked, kind) for kind in KINDS if getattr(asked, kind)}
    listeners = [Fault(kind, rank, step) for kind, (rank, step) in found.items()]
    try:
        config = read_config(asked.recipe, [parse_setting(text) for text in asked.set])
        train(config, asked.run, listeners, resume=asked.resume)
    except (TezoError, RunInterrupted) as error:
        print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
