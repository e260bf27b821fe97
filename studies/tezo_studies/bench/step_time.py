"""Time of a step. Every round measures every case, so that a ratio compares measurements close in time."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tezo.system.errors import RequestError
from tezo_studies.bench.cases import Case, make_case
from tezo_studies.bench.result_files import circumstances, describe, silent, spread
from tezo_studies.bench.settings import EACH, PLAIN, PREFIX, Settings
from tezo_studies.bench.workload import Work

LEAST_ROUNDS = 3
REPEATS = 5
PATIENCE = 3.0
"""Seconds. A case is run up to `REPEATS` times per round, as often as fits into about this time, and the median counts:
on a shared machine a single run says little."""

REFRESH_EVERY = 3
"""Rounds between measured refreshes, which are rare: one step per interval."""


@dataclass
class Timed:
    """Measured times of a case.

    Attributes:
        case: the case.
        repeats: runs per round.
        rounds: median seconds of a run in each round.
        refreshes: seconds of each measured refresh.
    """

    case: Case
    repeats: int = 1
    rounds: list[float] = field(default_factory=list)
    refreshes: list[float] = field(default_factory=list)

    def steps(self) -> list[float]:
        """Seconds per step in each round; with lazy factors, the mean over an interval with one refresh."""
        interval = self.case.interval
        if interval is None or not self.refreshes:
            return list(self.rounds)
        refresh = statistics.median(self.refreshes)
        return [((interval - 1) * seconds + refresh) / interval for seconds in self.rounds]


def measure_step(settings: Settings, labels: Sequence[str], tell: Callable[[str], None] = silent) -> Any:
    """Measures F2, N2, J2 and the cases of `labels`; returns the content of the JSON file.

    Args:
        settings: settings of the benchmark.
        labels: labels of cases, from `settings.entries`.
        tell: called with progress messages.

    Raises:
        RequestError: the device has too little memory.
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
            entry.case.close()
    head = {"kind": "step", "settings": describe(settings), "tokens": work.tokens}
    return head | circumstances(work) | {"rounds": len(timed[0].rounds), "rows": rows(timed)}


def run_rounds(
    timed: Sequence[Timed],
    settings: Settings,
    synchronize: Callable[[], None],
    started: float,
    tell: Callable[[str], None] = silent,
    most_repeats: int = REPEATS,
) -> None:
    """Warms up, then runs every case once per round; the order is rotated by one in each round.

    No round begins that would end after `settings.seconds` if it took as long as the last; three rounds always run.

    Args:
        timed: the cases; the measured times are added to them.
        settings: number of rounds, warm-up rounds and time limit.
        synchronize: waits for the device.
        started: `time.perf_counter()` at the start of the benchmark.
        tell: called with progress messages.
        most_repeats: runs of a quick case in a round, at most.
    """
    for entry in timed:
        for _ in range(settings.warmup):
            tell(f"warm-up: {entry.case.label}")
            seconds = _clock(entry.case.run, synchronize)
            entry.repeats = min(most_repeats, max(1, int(PATIENCE / max(seconds, 1e-9))))
    for number in range(settings.rounds):
        begun = time.perf_counter()
        turn = number % len(timed)
        for entry in (*timed[turn:], *timed[:turn]):
            tell(f"round {number + 1}: {entry.case.label}")
            runs = [_clock(entry.case.run, synchronize) for _ in range(entry.repeats)]
            entry.rounds.append(statistics.median(runs))
            if entry.case.interval is not None and number % REFRESH_EVERY == 0:
                entry.refreshes.append(_clock(entry.case.run_refresh, synchronize))
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
    """One row per case: seconds, and ratios to other cases, each the median of the ratios of all rounds."""
    steps = {entry.case.label: entry.steps() for entry in timed}
    return [_row(entry, steps) for entry in timed]


def _row(entry: Timed, steps: dict[str, list[float]]) -> dict[str, Any]:
    label, own = entry.case.label, steps[entry.case.label]
    published = steps.get(PREFIX + label)
    shared = steps.get(label.removeprefix(EACH)) if label.startswith(EACH) else None
    row: dict[str, Any] = {"label": label, "seconds": spread(own), "to_F2": ratio(own, steps["F2"])}
    row |= {"to_N2": ratio(own, steps["N2"]), "to_J2": ratio(own, steps["J2"])}
    row |= {"speed_up": ratio(published, own) if published else None}
    row |= {"to_shared": ratio(own, shared) if shared else None}
    row |= {"trained": entry.case.trained, "runs_a_round": entry.repeats, "rounds": own}
    if entry.case.interval is not None:
        row |= {"interval": entry.case.interval, "plain": entry.rounds, "refreshes": entry.refreshes}
    return row


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """The median over rounds of the ratio of two cases within a round."""
    return round(statistics.median(a / b for a, b in zip(of, to, strict=True)), 4)
