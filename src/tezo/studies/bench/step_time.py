"""Time of a step: every make_case in every round, in one run, so that a ratio compares neighbours in time."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tezo.errors import RequestError
from tezo.studies.bench.cases import Case, make_case
from tezo.studies.bench.result_files import circumstances, describe, silent, spread
from tezo.studies.bench.settings import PLAIN, PREFIX, Settings
from tezo.studies.bench.workload import Work

LEAST_ROUNDS = 3
REPEATS = 5
PATIENCE = 3.0
"""A round's figure is the median of up to five runs in a row, as many as take about so many seconds: on a machine
that others share a single run tells little."""

REFRESH_EVERY = 3
"""Rounds from one measured refresh to the next: over an interval it is one step of many."""


@dataclass
class Timed:
    """The seconds of a make_case, round by round; of refreshes, in the rounds that had one."""

    make_case: Case
    repeats: int = 1
    rounds: list[float] = field(default_factory=list)
    refreshes: list[float] = field(default_factory=list)

    def steps(self) -> list[float]:
        """Seconds of a step in each round; with lazy factors, the mean over an interval with its one refresh."""
        interval = self.make_case.interval
        if interval is None or not self.refreshes:
            return list(self.rounds)
        refresh = statistics.median(self.refreshes)
        return [((interval - 1) * seconds + refresh) / interval for seconds in self.rounds]


def measure_step(settings: Settings, labels: Sequence[str], tell: Callable[[str], None] = silent) -> Any:
    """Measures F2, N2, J2 and the contestants of `labels`; returns what the JSON file has.

    Args:
        settings: of the run.
        labels: as `settings.entries` gives them.
        tell: told of progress.
    """
    started = time.perf_counter()
    work = Work(settings)
    timed = [Timed(make_case(label, work)) for label in (*PLAIN, *labels)]
    try:
        run_rounds(timed, settings, work.synchronize, started, tell)
    except torch.OutOfMemoryError as error:
        raise RequestError(
            f"{settings.model} in {settings.dtype} with batch {settings.batch} does not fit on {settings.device}; "
            "lower batch or length, or name fewer methods."
        ) from error
    finally:
        for entry in timed:
            entry.make_case.close()
    head = {"kind": "step", "settings": describe(settings), "tokens": work.tokens}
    return head | circumstances(work) | {"rounds": len(timed[0].rounds), "rows": rows(timed)}


def run_rounds(
    timed: Sequence[Timed],
    settings: Settings,
    synchronize: Callable[[], None],
    started: float,
    tell: Callable[[str], None] = silent,
) -> None:
    """Warm-up, then rounds in which each make_case has its turn, the order turned on by one each round.

    A round is not begun when it would, at the pace of the last, end after `settings.seconds`; three are always run.
    """
    for entry in timed:
        for _ in range(settings.warmup):
            tell(f"warm-up: {entry.make_case.label}")
            seconds = _clock(entry.make_case.run, synchronize)
            entry.repeats = min(REPEATS, max(1, int(PATIENCE / max(seconds, 1e-9))))
    for number in range(settings.rounds):
        begun = time.perf_counter()
        turn = number % len(timed)
        for entry in (*timed[turn:], *timed[:turn]):
            tell(f"round {number + 1}: {entry.make_case.label}")
            runs = [_clock(entry.make_case.run, synchronize) for _ in range(entry.repeats)]
            entry.rounds.append(statistics.median(runs))
            if entry.make_case.interval is not None and number % REFRESH_EVERY == 0:
                entry.refreshes.append(_clock(entry.make_case.run_refresh, synchronize))
        now = time.perf_counter()
        late = settings.seconds is not None and now - started + (now - begun) > settings.seconds
        if late and number + 1 >= LEAST_ROUNDS:
            return


def _clock(run: Callable[[], None], synchronize: Callable[[], None]) -> float:
    synchronize()
    begun = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - begun


def rows(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """One row a make_case: seconds, and ratios as medians of the ratios of each round."""
    steps = {entry.make_case.label: entry.steps() for entry in timed}
    return [_row(entry, steps) for entry in timed]


def _row(entry: Timed, steps: dict[str, list[float]]) -> dict[str, Any]:
    label, own = entry.make_case.label, steps[entry.make_case.label]
    published = steps.get(PREFIX + label)
    row: dict[str, Any] = {"label": label, "seconds": spread(own), "to_F2": _ratio(own, steps["F2"])}
    row |= {"to_N2": _ratio(own, steps["N2"])}
    row |= {"speed_up": _ratio(published, own) if published else None}
    row |= {"trained": entry.make_case.trained, "runs_a_round": entry.repeats, "rounds": own}
    if entry.make_case.interval is not None:
        row |= {"interval": entry.make_case.interval, "plain": entry.rounds, "refreshes": entry.refreshes}
    return row


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(of, to, strict=True)), 4)
