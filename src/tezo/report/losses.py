"""What the losses of a run are, in words: runs share a chart where their words are the same."""

from tezo.report.run_config import run_config
from tezo.runs.reader import Run
from tezo.runs.result_words import OPTIONS_LOSS, REWARD, TEXT_LOSS, minus

UNKNOWN = "loss"
"""Of a run that has ended without saying it, and has no metric that tells."""


def row_loss(run: Run) -> str:
    """The loss of dev and test rows."""
    said = _said(run, "rows")
    names = {name for evaluation in run.evaluations for name in evaluation.metrics}
    if said is not None:
        return said
    if REWARD in names:
        return minus(REWARD)
    if "token_accuracy" in names:
        return TEXT_LOSS
    return OPTIONS_LOSS if "accuracy" in names else UNKNOWN


def step_loss(run: Run) -> str:
    """The loss of a step on its batch."""
    settings = run_config(run).train
    return _said(run, "steps") or (row_loss(run) if settings.minimises_loss else minus(settings.objective))


def _said(run: Run, part: str) -> str | None:
    """What the summary says; None: there is none, or one of an earlier version."""
    said = (run.summary or {}).get("losses", {}).get(part)
    return said if isinstance(said, str) else None


def dev_losses(run: Run) -> list[tuple[int, float]]:
    """(steps, loss on the dev rows), in the order of steps.

    A run without test rows of its own evaluates its dev rows as "test" before the first step, and not again as "dev".
    """
    of = {
        split: [(e.step, e.metrics["loss"]) for e in run.evaluations if e.split == split and "loss" in e.metrics]
        for split in ("dev", "test")
    }
    if not of["dev"] or of["dev"][0][0] == 0:
        return of["dev"]
    return [*(point for point in of["test"][:1] if point[0] == 0), *of["dev"]]
