"""The loop: evaluate, step, evaluate, save."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tezo.config import Config, TrainConfig
from tezo.errors import RequestError, nearest
from tezo.evaluate import Metrics, evaluate
from tezo.export import make_adapter, save_adapter, save_model
from tezo.job import LOSS, Job, prepare
from tezo.objectives import Encoded
from tezo.optimizer import ZerothOrderOptimizer
from tezo.random import permutation
from tezo.runs import Listener, Progress, RunFolder, hardware, memory_for, peak_memory, plan, versions
from tezo.spsa import Closure


def train(config: Config, output: Path, listeners: Sequence[Listener] = ()) -> dict[str, Any]:
    """Runs a configuration from start to end; returns the summary that is also in `output`/summary.json.

    Args:
        config: what to do.
        output: run folder; must not exist, or be empty.
        listeners: told of every step and evaluation; see `tezo.callbacks` for transformers' callbacks.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        NonFiniteLossError: a loss was NaN or infinite; the folder has what was logged until then.
    """
    folder = RunFolder(output)
    folder.check_free()
    job = prepare(config)
    return Loop(job, folder, [folder, *listeners]).run()


@dataclass
class Best:
    """The evaluation with the lowest dev loss so far, and the parameters it was made with."""

    step: int
    loss: float
    state: dict[str, Tensor] | None
    since: int = 0
    """Evaluations since."""


class Loop:
    """One run of a job.

    Args:
        job: what `prepare` returned.
        folder: where the result goes.
        listeners: told of everything, in order.
    """

    def __init__(self, job: Job, folder: RunFolder, listeners: Sequence[Listener]) -> None:
        self.job = job
        self.settings = job.config.train
        self.folder = folder
        self.listeners = listeners
        self.scheduler = LambdaLR(job.optimizer, lr_factor(self.settings))
        self.best: Best | None = None
        self.step_seconds = 0.0

    def run(self) -> dict[str, Any]:
        """Everything, from the first evaluation to the saved result."""
        try:
            return self._run()
        finally:
            for listener in self.listeners:
                listener.closed()

    def _run(self) -> dict[str, Any]:
        job, settings = self.job, self.settings
        self._check_objective()
        for listener in self.listeners:
            listener.started(job)
        before = self._evaluate("test", 0)
        every = evaluation_interval(settings) if job.dev else 0
        if every:
            self._evaluate_dev(0, before)
        steps = 0
        for steps in range(1, settings.steps + 1):
            self._step(steps - 1)
            last = steps == settings.steps or self._asked_to_stop()
            if every and (steps % every == 0 or last):
                self._evaluate_dev(steps, None)
            if last or self._asked_to_stop() or self._is_tired():
                break
        self._restore_best(steps)
        after = self._evaluate("test", steps)
        return self._finish(steps, before, after)

    def _step(self, step: int) -> None:
        indices = batch_indices(len(self.job.train), self.settings.batch_size, step, self.settings.seed)
        for listener in self.listeners:
            listener.stepping(step)
        started = time.perf_counter()
        with memory_for(f"step {step}", [self.job.train[i] for i in indices], "train.batch_size"):
            self.job.optimizer.step(self._closure(indices))
        self.scheduler.step()
        self.step_seconds += time.perf_counter() - started
        record = self.job.optimizer.last_step
        assert record is not None
        for listener in self.listeners:
            listener.stepped(Progress(record, self.step_seconds, peak_memory()))

    def _closure(self, indices: Sequence[int]) -> Closure:
        """What a step minimises on these rows."""
        job, name = self.job, self.settings.objective
        if name == LOSS:
            return job.objective.closure(job.model, job.batches(indices))
        rows = [job.train[i] for i in indices]
        return lambda: -self._metrics(rows, written=True)[name]

    def _check_objective(self) -> None:
        """An error where the objective is not a metric of these rows, or has no gradient and needs one."""
        name, optimizer = self.settings.objective, self.job.optimizer
        if name == LOSS:
            return
        if not isinstance(optimizer, ZerothOrderOptimizer):
            raise RequestError(f"train.objective is {name}, which has no gradient; use a zeroth-order method.")
        known = self._metrics(self.job.train[:1], written=True)
        if name not in known or name == LOSS:
            raise RequestError(f"train.objective: there is no metric {name!r} of these rows. " + nearest(name, known))

    def _metrics(self, encoded: Sequence[Encoded], *, written: bool) -> Metrics:
        # written answers take a pass a token: dev rows, which choose by the loss alone, go without
        job, form = self.job, self.job.format
        measures = form.measures if written else ()
        new = form.max_new_tokens or 0
        size = self.settings.eval_batch_size
        return evaluate(job.model, job.objective, encoded, size, measures=measures, max_new_tokens=new)

    def _evaluate(self, split: str, step: int) -> Metrics:
        encoded = self.job.test if split == "test" else self.job.dev
        size = self.settings.eval_batch_size
        longest = sorted(encoded, key=lambda row: row.length)[-size:]
        with memory_for(f"the evaluation before step {step}", longest, "train.eval_batch_size"):
            metrics = self._metrics(encoded, written=split == "test")
        for listener in self.listeners:
            listener.evaluated(split, step, metrics)
        return metrics

    def _evaluate_dev(self, step: int, known: Metrics | None) -> None:
        same = known is not None and self.job.dev is self.job.test
        loss = known["loss"] if same and known is not None else self._evaluate("dev", step)["loss"]
        if self.best is None or loss < self.best.loss:
            state = self.job.optimizer.tuned_state() if self.settings.keep_best else None
            self.best = Best(step, loss, state)
        else:
            self.best.since += 1

    def _asked_to_stop(self) -> bool:
        return any(listener.wants_stop for listener in self.listeners)

    def _is_tired(self) -> bool:
        patience = self.settings.patience
        return patience is not None and self.best is not None and self.best.since >= patience

    def _restore_best(self, steps: int) -> None:
        if self.best is not None and self.best.state is not None and self.best.step != steps:
            self.job.optimizer.load_tuned_state(self.best.state, self.best.step)

    def _finish(self, steps: int, before: Metrics, after: Metrics) -> dict[str, Any]:
        job = self.job
        kept = self.best.step if self.best is not None and self.settings.keep_best else steps
        summary = {
            "method": job.config.method.name,
            "model": job.config.model.name,
            "before": before,
            "after": after,
            "rows": {"train": len(job.train), "dev": len(job.dev), "test": len(job.test)},
            "steps": steps,
            "kept_step": kept,
            "dev_loss": self.best.loss if self.best is not None else None,
            "num_forward_passes": job.optimizer.num_forward_passes,
            "seconds_stepping": round(self.step_seconds, 3),
            "peak_memory": peak_memory(),
            "parameters": _count(plan(job.model, job.optimizer)),
            "result": self._save(),
            "prompt_shared_by_options": job.objective.packs,
            "notices": list(job.notices),
            "seed": self.settings.seed,
            "hardware": hardware(),
            "versions": versions(),
        }
        for listener in self.listeners:
            listener.finished(summary)
        return summary

    def _save(self) -> dict[str, Any]:
        job, reason = self.job, self.job.optimizer.why_no_adapter()
        if job.config.model.peft != "none":
            job.optimizer.merge()  # into the adapter's own tensors
            job.model.save_pretrained(self.folder.path / "adapter")
            return {"kind": "peft", "folder": "adapter", "adapter": job.config.model.peft}
        if isinstance(job.optimizer, ZerothOrderOptimizer) and reason is None:
            adapter = make_adapter(job.optimizer)
            base = job.config.model.name
            save_adapter(adapter, self.folder.path / "adapter", model=job.model, base=base)
            return {"kind": "adapter", "folder": "adapter", "rank": adapter.rank}
        job.optimizer.merge()
        save_model(job.model, job.loaded.tokenizer, self.folder.path / "model")
        return {"kind": "model", "folder": "model", "why_no_adapter": reason}


def batch_indices(rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of a step's batch: epoch after epoch, each in its own order, as a function of (seed, step) alone."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    orders = {epoch: permutation(rows, seed=seed, step=epoch, name="epoch") for epoch in {p // rows for p in positions}}
    return [orders[p // rows][p % rows] for p in positions]


def lr_factor(settings: TrainConfig) -> Any:
    """The schedule: step -> factor of the learning rate."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        left = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
        if settings.schedule == "linear":
            return 1.0 - left
        return (1 + math.cos(math.pi * left)) / 2 if settings.schedule == "cosine" else 1.0

    return factor


def evaluation_interval(settings: TrainConfig) -> int:
    """Steps between evaluations; 0 is never."""
    return max(1, settings.steps // 10) if settings.eval_every is None else settings.eval_every


def _count(rows: list[dict[str, Any]]) -> dict[str, int]:
    sizes = [(int(torch.Size(row["shape"]).numel()), row["trained"]) for row in rows]
    return {"total": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}
