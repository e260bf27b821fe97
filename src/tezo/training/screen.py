"""Progress of a run on standard error: its phases, what is tuned, the evaluations, and two samples of free text."""

from collections.abc import Mapping
from typing import Any

from tezo.runs.step_log import Rollback
from tezo.runs.words import metric_text
from tezo.system.progress import STEPS, StatusLine
from tezo.tasks.evaluation import Metrics
from tezo.training.job import Job, parameter_table
from tezo.training.listeners import Listener, Progress
from tezo.training.stopping import in_words
from tezo.training.summary import row_counts

MOST_SAMPLE = 300
"""Characters of a sample that are printed; of a longer one the last."""


class Screen(Listener):
    """Prints to `line` what a run reports beside the phases that this status line shows."""

    def __init__(self, line: StatusLine) -> None:
        self.line = line
        self.dev_losses: list[float] = []
        self._of_step: list[str] = []

    def started(self, job: Job) -> None:
        self.job = job
        rows, parameters = row_counts(job), parameter_table(job.model, job.optimizer)
        trained = [row for row in parameters if row["trained"]]
        ranks = sorted({row["rank"] for row in trained if row["rank"] is not None})
        span = "" if not ranks else f", rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "")
        factors = f"; fixed factors take {job.optimizer.factor_bytes / 2**20:.1f} MiB" if ranks else ""
        moved = " and ".join(sorted({row["moved"] for row in trained}))
        model = f"{job.config.model.name} ({job.loaded.kind}, {job.model.dtype}, {job.model.device})"
        self.line.print(f"{job.config.method.name} on {model}")
        self.line.print(f"{len(trained)} of {len(parameters)} parameters are trained{span}, moved {moved}{factors}")
        for line in str(job.optimizer.settings).splitlines():
            self.line.print(f"  {line}")
        self.line.print(f"{rows['train']} training rows, {rows['dev']} dev, {rows['test']} test")
        for line in (*job.rows_as_read, *(f"note: {notice}" for notice in job.notices)):
            self.line.print(line)

    def resumed(self, evaluations: Mapping[tuple[str, int], Metrics]) -> None:
        of_dev = [(step, metrics["loss"]) for (split, step), metrics in evaluations.items() if self._is_dev(split)]
        self.dev_losses = [loss for _, loss in sorted(of_dev)]

    def _is_dev(self, split: str) -> bool:
        return split == "dev" or (split == "test" and self.job.test is self.job.dev)

    def stepped(self, progress: Progress) -> None:
        record = progress.record
        figures = [f"loss {record.loss:.4f}", f"{progress.memory / 2**20:.0f} MiB"]
        if record.probes:
            kappa = sum(abs(k) for k in record.projected_grads) / len(record.probes)
            figures.insert(1, f"|kappa| {kappa:.3g}")
        self._of_step = figures
        self._show()

    def _show(self) -> None:
        dev = [f"dev {self.dev_losses[0]:.4f} -> {self.dev_losses[-1]:.4f}"] if self.dev_losses else []
        self.line.figures[STEPS] = ", ".join([*dev, *self._of_step])

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        split = "dev" if self._is_dev(split) else split
        if split == "dev":
            self.dev_losses.append(metrics["loss"])
            self._show()
        figures = "  ".join(f"{name} {metric_text(name, value)}" for name, value in metrics.items())
        self.line.print(f"  step {step:>6}  {split:<5} {figures}")

    def warned(self, text: str) -> None:
        self.line.print(f"notice: {text}")

    def rolled_back(self, rollback: Rollback) -> None:
        self.line.print(f"  step {rollback.step:>6}  {in_words(rollback)}")

    def compared(self, answers: dict[str, Any]) -> None:
        for row in [] if self.job.test[0].example.options else answers["shown"]:
            self.line.print(f"sample of {row['row']}")
            for name, key in (("prompt", "text"), ("before", "before"), ("after", "after")):
                text = " ".join(row[key].split())
                text = text if len(text) <= MOST_SAMPLE else "..." + text[-MOST_SAMPLE:]
                self.line.print(f"  {name:<6} {text}")
