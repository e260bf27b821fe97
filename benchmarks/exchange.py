"""How long ranks take to add up the few numbers of a step.

    python benchmarks/exchange.py [--ranks 2 4] [--json FILE]

Real processes over gloo on this machine, as torchrun starts them; a median over a thousand exchanges.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from tezo.runs.environment import hardware, versions
from tezo.system.processes import join

EXCHANGES = 1000
NUMBERS = [0.5, 0.25, 16.0]
"""The sums of losses at plus and minus, and how many."""


def main() -> None:
    """Starts the ranks, and prints what the first of each lot measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help="Be one of them.")
    arguments = parser.parse_args()
    if arguments.rank:
        be_a_rank()
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    found = {}
    for count in arguments.ranks:
        command = [*launch, str(count), __file__, "--rank"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[count] = json.loads(done.stdout)
    result = {"seconds": found, "numbers": len(NUMBERS), "hardware": hardware(), "versions": versions()}
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def be_a_rank() -> None:
    """Exchanges, and prints its median seconds if it is the first."""
    torch.set_num_threads(1)
    processes, seconds = join(), []
    for _ in range(EXCHANGES):
        started = time.perf_counter()
        processes.sum(NUMBERS)
        seconds.append(time.perf_counter() - started)
    if processes.is_first:
        print(statistics.median(seconds))
    processes.close()


if __name__ == "__main__":
    main()
