"""Progress of a run on the screen: what is tuned, a progress bar, and the evaluations."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tezo.cli.common import readable
from tezo.tasks.evaluation import Metrics
from tezo.training.job import Job
from tezo.training.listeners import Listener
from tezo.training.listeners import Progress as StepProgress
from tezo.training.plan import plan


class Screen(Listener):
    """Prints the progress to standard error; standard output is for results."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )

    def started(self, job: Job) -> None:
        for line in _start_lines(job):
            self.console.print(line, markup=False)
        self.task = self.bar.add_task("", total=job.config.train.steps, figures="")
        self.bar.start()

    def stepped(self, progress: StepProgress) -> None:
        record = progress.record
        rate = (record.step + 1) / max(progress.seconds, 1e-9)
        figures = [f"loss {record.loss:.4f}", f"{rate:.2f} steps/s", f"{progress.memory / 2**20:.0f} MiB"]
        if record.probes:
            kappa = sum(abs(k) for k in record.projected_grads) / len(record.probes)
            figures.insert(1, f"|kappa| {kappa:.3g}")
        self.bar.update(self.task, completed=record.step + 1, figures="  ".join(figures))

    def evaluated(self, split: str, step: int, metrics: Metrics) -> None:
        figures = "  ".join(f"{name} {readable(name, value)}" for name, value in metrics.items())
        self.bar.console.print(f"  step {step:>6}  {split:<5} {figures}", markup=False)

    def closed(self) -> None:
        self.bar.stop()


def _start_lines(job: Job) -> list[str]:
    rows = plan(job.model, job.optimizer)
    trained = [row for row in rows if row["trained"]]
    ranks = sorted({row["rank"] for row in trained if row["rank"] is not None})
    span = "" if not ranks else f", rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "")
    moved = sorted({row["moved"] for row in trained})
    model = f"{job.config.model.name} ({job.loaded.kind}, {job.model.dtype}, {job.model.device})"
    lines = [
        f"{job.config.method.name} on {model}",
        f"{len(trained)} of {len(rows)} parameters are trained{span}, moved {' and '.join(moved)}"
        + (f"; fixed factors take {job.optimizer.factor_bytes / 2**20:.1f} MiB" if ranks else ""),
        f"{len(job.train)} training rows, {len(job.dev)} dev, {len(job.test)} test",
    ]
    return lines + [f"note: {notice}" for notice in job.notices]
