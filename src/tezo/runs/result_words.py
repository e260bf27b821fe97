"""The result of a run in words, the same at the end of a run on the screen and in a report."""

from collections.abc import Mapping
from typing import Any

REWARD = "reward"
"""The metric, and the objective, that a scorer of the user's defines."""
TEXT_LOSS = "negative log-likelihood per answer token, in nats"
OPTIONS_LOSS = "cross-entropy over the options, in nats"


def metric_text(name: str, value: float) -> str:
    """A loss, or what is no share, with four decimals; a share as a percentage: 0.512 -> "51.2 %"."""
    return f"{value:.4f}" if is_plain(name, value) else f"{100 * value:.1f} %"


def is_plain(name: str, value: float) -> bool:
    """Whether a metric is shown as it is, not as a percentage."""
    return name == REWARD or name.endswith("loss") or not -1 <= value <= 1


def change_text(name: str, before: float, after: float) -> str:
    """The change of a metric with its sign: of a loss with four decimals, of a share in percentage points."""
    by = after - before
    plain = is_plain(name, before) or is_plain(name, after)
    text = f"{by:+.4f}" if plain else f"{100 * by:+.1f} points"
    return text.replace("-", "\N{MINUS SIGN}")


def count_text(count: int) -> str:
    """A count with its thousands apart: "12,345"."""
    return f"{count:,}"


def duration_text(seconds: float) -> str:
    """Seconds as "4.2 s", "3 min 20 s" or "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    return f"{hours} h {minutes_of_hour:02d} min" if hours else f"{minutes} min {rest:02d} s"


def measured_rows_text(summary: Mapping[str, Any]) -> str:
    """The rows of the metrics before and after: "60 test rows", or dev rows that also chose the step; "" if unknown."""
    count = summary.get("rows", {}).get("test")
    if not isinstance(count, int):
        return ""
    kind = "dev rows, which also chose the step" if summary.get("test_rows_chose") is True else "test rows"
    return f"{count_text(count)} {kind}"


def work_text(summary: Mapping[str, Any]) -> str:
    """The work of a finished run: "200 steps, 402 forward passes, 3 min 20 s; step 160 kept"; what is known of it."""
    parts = [
        f"{count_text(summary[key])} {unit}"
        for key, unit in (("steps", "steps"), ("num_forward_passes", "forward passes"))
        if key in summary
    ]
    if "seconds_stepping" in summary:
        parts.append(duration_text(summary["seconds_stepping"]))
    kept = f"; step {count_text(summary['kept_step'])} kept" if "kept_step" in summary else ""
    return ", ".join(parts) + kept


def minus(metric: str) -> str:
    """The loss of steps that raise a metric, in words."""
    return f"minus {'the mean reward' if metric == REWARD else metric}"
