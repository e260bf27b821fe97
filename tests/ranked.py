"""What a rank of tests/test_ranks.py does: `train`, with a fault on one rank where one is asked for.

torchrun ... tests/ranked.py RECIPE RUN [--set KEY=VALUE] [--resume] [--die | --drift | --term RANK STEP]
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tezo.errors import TezoError
from tezo.training.config import parse_setting, read_config
from tezo.training.listeners import Listener
from tezo.training.loop import train


class Fault(Listener):
    def __init__(self, kind: str, rank: int, step: int) -> None:
        self.kind, self.step, self.mine = kind, step, int(os.environ["RANK"]) == rank
        self.job: Any = None

    def started(self, job: Any) -> None:
        self.job = job

    def stepping(self, step: int) -> None:
        if not self.mine or step != self.step:
            return
        if self.kind == "drift":
            next(iter(self.job.optimizer.resumable_state().values())).view(-1)[0] += 1e-3
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "die" else signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    for kind in ("--die", "--drift", "--term"):
        parser.add_argument(kind, type=int, nargs=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {kind: getattr(asked, kind) for kind in ("die", "drift", "term") if getattr(asked, kind)}
    listeners = [Fault(kind, rank, step) for kind, (rank, step) in found.items()]
    try:
        config = read_config(asked.recipe, [parse_setting(text) for text in asked.set])
        train(config, asked.run, listeners, resume=asked.resume)
    except TezoError as error:
        print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
