"""One case at a time, each with its memory, its time and the plain passes beside it, so that none waits for others."""

import gc
import time
from typing import Any

import torch

from tezo_studies.bench.cases import Case, make_case
from tezo_studies.bench.peak_memory import forget_peak, peak_now
from tezo_studies.bench.result_files import spread
from tezo_studies.bench.step_time import Timed, ratio, run_rounds
from tezo_studies.bench.workload import Work

STEPS = 2
"""Steps before the peak is read, followed by one refresh if there are lazy factors."""


def measure_case(label: str, work: Work, two_passes: Case) -> dict[str, Any]:
    """Peak memory of some steps of a case, then its time in rounds, in each of which `two_passes` runs too.

    Args:
        label: the label of the case.
        work: model, batch, and the settings with the number of rounds and their time limit.
        two_passes: the case F2 on this work.

    Returns:
        "seconds" of a step, "F2_seconds" beside it, the ratio "to_F2", "tokens_per_second" of the batch without
        padding, "peak" in bytes, "held" bytes between steps, "trained" entries, "starting": seconds until the first
        step was done, "rounds".
    """
    gc.collect()  # earlier cases may be kept alive by reference cycles
    forget_peak(work.device)
    started = time.perf_counter()
    case = make_case(label, work)
    try:
        case.run()
        work.synchronize()
        starting = time.perf_counter() - started
        peak = _peak_of_steps(case, work)
        timed = [Timed(two_passes), Timed(case)]
        run_rounds(timed, work.settings, work.synchronize, time.perf_counter(), most_repeats=1)
        held = case.state_bytes()
    finally:
        case.close()
    plain, own = (entry.steps() for entry in timed)
    seconds = spread(own)
    return {
        "seconds": seconds, "F2_seconds": spread(plain), "to_F2": ratio(own, plain),
        "tokens_per_second": round(work.tokens / seconds["median"], 1), "peak": peak, "held": held,
        "trained": case.trained, "starting": round(starting, 3), "rounds": len(own),
    }  # fmt: skip


def _peak_of_steps(case: Case, work: Work) -> int:
    """Peak in bytes since it was forgotten: allocated on a GPU, the resident set of this process on a CPU."""
    for _ in range(STEPS - 1):
        case.run()
    if case.interval is not None:
        case.run_refresh()
    work.synchronize()
    return int(torch.cuda.max_memory_allocated(work.device)) if work.device.type == "cuda" else peak_now(work.device)
