"""What a rank of tests/test_ranks.py does: `train`, with a fault on one rank where one is asked for.

torchrun ... tests/ranked.py RECIPE RUN [--resume] [--die RANK STEP | --drift RANK STEP | --term RANK STEP]
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tezo.config import read_config
from tezo.errors import TezoError
from tezo.runs import Listener
from tezo.train import train


class Fault(Listener):
    def __init__(self, kind: str, rank: int, step: int) -> None:
        self.kind, self.step, self.mine = kind, step, int(os.environ["RANK"]) == rank
        self.job: Any = None

    def started(self, job: Any) -> None:
        self.job = job

    def stepping(self, step: int) -> None:
        if not self.mine or step != self.step:
            return
        if self.kind == "--drift":
            next(iter(self.job.optimizer.resumable_state().values())).view(-1)[0] += 1e-3
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "--die" else signal.SIGTERM)


def main() -> int:
    recipe, run, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    resume = "--resume" in flags
    faults = [flag for flag in flags if flag != "--resume"]
    listeners = [Fault(faults[0], int(faults[1]), int(faults[2]))] if faults else []
    try:
        train(read_config(Path(recipe), []), Path(run), listeners, resume=resume)
    except TezoError as error:
        print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
