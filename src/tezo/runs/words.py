"""The result of a run in words, the same at the end of a run on the screen and in a report."""

from collections.abc import Mapping
from typing import Any

from tezo.system.progress import EARLIER, duration_text
from tezo.tasks.scoring import REWARD

TEXT_LOSS = "negative log-likelihood per answer token, in nats"
OPTIONS_LOSS = "cross-entropy over the options, in nats"
BETTER, HARDLY, NO_BETTER = "Better", "Hardly better", "No better"
"""The first words of a verdict."""


def metric_text(name: str, value: float) -> str:
    """Returns a loss, or any number but a share, with four decimals; a share as a percentage: 0.512 -> "51.2 %"."""
    return f"{value:.4f}" if _is_plain(name, value) else f"{100 * value:.1f} %"


def _is_plain(name: str, value: float) -> bool:
    """Whether a metric is shown as it is, not as a percentage."""
    return name == REWARD or name.endswith("loss") or not -1 <= value <= 1


def change_text(name: str, before: float, after: float) -> str:
    """Returns the change of a metric with its sign: of a loss with four decimals, of a share in percentage points."""
    by = after - before
    plain = _is_plain(name, before) or _is_plain(name, after)
    text = f"{by:+.4f}" if plain else f"{100 * by:+.1f} points"
    return text.replace("-", "\N{MINUS SIGN}")


def count_text(count: int) -> str:
    """Returns a count with its thousands apart: "12,345"."""
    return f"{count:,}"


def measured_rows_text(summary: Mapping[str, Any]) -> str:
    """Names the rows of the metrics: "60 test rows", or dev rows that also chose the step; "" if unknown."""
    test, dev = (summary.get("rows", {}).get(split) for split in ("test", "dev"))
    if not isinstance(test, int):
        return ""
    if test > 0 or not isinstance(dev, int):
        return f"{test:,} test rows"
    return f"{dev:,} dev rows" + (", which also chose the step" if summary.get("test_rows_chose") is True else "")


def work_text(summary: Mapping[str, Any]) -> str:
    """Returns the work of a run in words, as far as it is known, with the longest phases beside the time.

    For example: "200 steps, 640 forward passes of 16 rows, 3 min 20 s (2 min 10 s steps); step 160 kept".
    """
    parts = [f"{summary['steps']:,} steps"] if "steps" in summary else []
    passes, seconds = work_of(summary)
    if passes is not None:
        of_rows = f" of {summary['batch_size']:,} rows" if "batch_size" in summary else ""
        parts.append(f"{least_text(summary)}{round(passes):,} forward passes{of_rows}")
    if seconds is not None:
        phases = {name: spent["seconds"] for name, spent in summary.get("phases", {}).items()}
        longest = [name for name in sorted(phases, key=phases.__getitem__)[:-4:-1] if phases[name] >= seconds / 20]
        of_it = ", ".join(f"{duration_text(phases[name])} {name}" for name in longest)
        parts.append(duration_text(seconds) + (f" ({of_it})" if of_it else ""))
    kept = f"; step {summary['kept_step']:,} kept" if "kept_step" in summary else ""
    return ", ".join(parts) + kept


def least_text(summary: Mapping[str, Any]) -> str:
    """Returns "at least " for a resumed run: its work after the last line of metrics is unknown."""
    return "at least " if EARLIER in summary.get("phases", {}) else ""


def work_of(summary: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Returns (forward passes, seconds) of all phases; where they are not known those of the steps alone, or None."""
    phases = summary.get("phases")
    if phases:
        passes, seconds = (sum(spent[key] for spent in phases.values()) for key in ("passes", "seconds"))
        return passes, seconds
    return summary.get("num_forward_passes"), summary.get("seconds_stepping")


def minus(metric: str) -> str:
    """Names the loss of steps that raise a metric."""
    return f"minus {'the mean reward' if metric == REWARD else metric}"


def left_out_text(name: str, count: int) -> str:
    """Names the bytes at the end of a file that are not read, because a process died while it wrote them."""
    return f"{count} bytes at the end of {name} are unfinished, and left out."
