"""One case at a time, each with its memory, its time and the plain passes beside it, so that none waits for others."""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from tezo_studies.bench.cases import Case, make_case
from tezo_studies.bench.launches import count_launches
from tezo_studies.bench.peak_memory import forget_peak, peak_now
from tezo_studies.bench.result_files import spread
from tezo_studies.bench.step_time import Timed, ratio, run_rounds
from tezo_studies.bench.workload import Work

STEPS = 2
"""Steps before the peak is read, followed by one refresh if there are lazy factors."""


def measure_case(label: str, work: Work, two_passes: Case, beside: Sequence[str] = ()) -> dict[str, Any]:
    """Peak memory of some steps of a case, then its time in rounds, in each of which `two_passes` and others run too.

    Args:
        label: the label of the case.
        work: model, batch, and the settings with the number of rounds and their time limit.
        two_passes: the case F2 on this work.
        beside: labels of further cases that it is compared with.

    Returns:
        "seconds" of a step, "F2_seconds" beside it, the ratio "to_F2", "beside": label -> seconds and ratio "to" of the
        others, "tokens_per_second" of the batch without padding, "peak" in bytes, on a GPU "reserved" by the allocator,
        "held" bytes between steps, "trained" entries, "starting": seconds until the first step was done, "rounds", what
        `count_launches` counts, and the `facts` of the case.
    """
    gc.collect()  # earlier cases may be kept alive by reference cycles
    made: list[Case] = []
    try:
        made += (make_case(other, work) for other in beside)  # they keep nothing before their first step
        forget_peak(work.device)
        started = time.perf_counter()
        case = make_case(label, work)
        made.append(case)
        case.run()
        work.synchronize()
        starting = time.perf_counter() - started
        memory = _memory_of_steps(case, work)
        timed = [Timed(two_passes), *map(Timed, made)]
        run_rounds(timed, work.settings, work.synchronize, time.perf_counter(), most_repeats=1)
        counts = count_launches(case.run, work.device)
        held, facts = case.state_bytes(), case.facts()
    finally:
        for each in made:
            each.close()
    plain, *compared, own = (entry.steps() for entry in timed)
    seconds = spread(own)
    return {
        "seconds": seconds, "F2_seconds": spread(plain), "to_F2": ratio(own, plain),
        "beside": {
            other: {"seconds": spread(times), "to": ratio(own, times)}
            for other, times in zip(beside, compared, strict=True)
        },
        "tokens_per_second": round(case.batches * work.tokens / seconds["median"], 1), **memory, "held": held,
        "trained": case.trained, "starting": round(starting, 3), "rounds": len(own), **counts, **facts,
    }  # fmt: skip


def _memory_of_steps(case: Case, work: Work) -> dict[str, int]:
    """Peaks in bytes since they were forgotten: on a GPU allocated and reserved, on a CPU the resident set."""
    for _ in range(STEPS - 1):
        case.run()
    if case.interval is not None:
        case.run_refresh()
    work.synchronize()
    if work.device.type == "cuda":
        return {"peak": int(torch.cuda.max_memory_allocated(work.device)), "reserved": peak_now(work.device)}
    return {"peak": peak_now(work.device)}
