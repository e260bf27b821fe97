"""The loop: evaluate, step, evaluate, save."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tezo.directions.bases.basis import FactorStore, StoredTensors
from tezo.models.kinds import IN_MEMORY
from tezo.models.loading import LoadedModel
from tezo.models.saving import Tuning, save_result
from tezo.models.stored import BaseFiles
from tezo.optim.closures import Closure
from tezo.optim.estimators.estimate import FEEDBACK
from tezo.runs.checkpoints import Checkpoint
from tezo.runs.environment import memory_for, peak_memory
from tezo.runs.folder import CONFIG, ResumeState, RunFolder, read_summary
from tezo.runs.replayed import is_replayed
from tezo.runs.step_log import End, LogContents, Rollback
from tezo.system.digests import digest
from tezo.system.errors import NonFiniteLossError, NonFiniteResultError, RequestError, RunInterrupted
from tezo.system.files import reading
from tezo.system.processes import ProcessGroup, join
from tezo.system.progress import AFTER, BEFORE, BETWEEN, FILES, OBJECTIVE, OPENING, SAVING, STEPS, current, metered
from tezo.system.warned import warned
from tezo.tasks.evaluation import Metrics
from tezo.tasks.rewards import GAPS, RewardRows, ScorerError
from tezo.tasks.scorers import identity
from tezo.tasks.scoring import Score
from tezo.tasks.splits import Splits, read_splits
from tezo.training.data_parallel import check_shareable, shared_rows
from tezo.training.evaluations import Evaluations, InCommon, check_objective, compare
from tezo.training.job import Job, check_untuned, parameter_table, prepare, with_settled_scorer
from tezo.training.listeners import Interruption, Listener, Progress
from tezo.training.resume import (
    as_json,
    change_texts,
    changed_scorer,
    check_given,
    check_same,
    check_scorer,
    check_unchanged,
    check_word,
    in_words,
    log_header,
    new_total,
    request_of,
    shared_header,
    with_choices_of,
    with_sources_of,
)
from tezo.training.rows_of_steps import interval, lr_factor
from tezo.training.settings import LOSS, Config, dump_config, read_config, with_absolute_paths
from tezo.training.stopping import CONTINUE, BestState, Decision, Stop, decide_after_failure
from tezo.training.summary import Outcome, prompt_text, row_counts, summarize, ways_from_alike


def train(
    config: Config,
    output: Path,
    listeners: Sequence[Listener] = (),
    *,
    resume: bool = False,
    loaded: LoadedModel | None = None,
    rows: Splits | None = None,
    score: Score | None = None,
    accept_scorer: bool = False,
) -> dict[str, Any]:
    """Runs a configuration from start to end; returns the summary that is also in `output`/summary.json.

    Args:
        config: what to do.
        output: run folder; must not exist, or be empty, unless a run is resumed.
        listeners: told of every step and evaluation; `TrainerCallbacks` of `tezo.trainer.callbacks` is one.
        resume: go on with the run in `output`, to the bit as if it had never stopped; start it where there is none.
            One that has ended goes on where it is given more steps; else its summary is returned.
        loaded: a model that is in memory, see `prepare`.
        rows: rows that are in memory, see `prepare`.
        score: scorer of completions that is an object, see `prepare`.
        accept_scorer: whether a run may go on with another scorer than before; its log, summary and card say so.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        NonFiniteLossError: a loss was NaN or infinite; the folder has what was logged until then.
        RunInterrupted: SIGINT or SIGTERM came; the step under way was finished and saved. A KeyboardInterrupt.
        RunError: something could not be written, or a file of the base was changed meanwhile; the run can be resumed.
    """
    processes = join()
    output = output.absolute()  # a scorer may change the working folder
    folder = RunFolder(output, writes=processes.is_first)
    with metered() as meter, meter.telling(listener.working for listener in listeners), warned() as said:
        try:
            processes.check_same({"resume": resume, "accept_scorer": accept_scorer, **request_of(config)})
            check_word(config, resume=resume, accept_scorer=accept_scorer)
            config = with_absolute_paths(config)
            with processes.together("use the run folder"):
                folder.check_free(resume=resume)
            begun = folder.log() if resume else None
            if resume and (summary := read_summary(output)) is not None:
                with meter.phase(FILES):
                    folder.check_ended()
                begun = begun or LogContents()
                check_unchanged(read_config(output / CONFIG, []), config, begun.header.get("stepped_rows"))
                check_given(begun.header, rows or read_splits(config.data), loaded)
                named = None if config.train.reward == IN_MEMORY else config.train.reward
                if (scorer := named if score is None else score) is not None:
                    check_scorer(begun, identity(scorer).to_json())
                if new_total(begun, with_choices_of(begun, config).train.steps) is None:
                    return summary
            if resume and is_replayed(output):
                raise RequestError(
                    f"{output} is what tezo replay made of the steps of another folder; go on with the run itself."
                )
            with processes.together("prepare the run"):
                if begun is not None:
                    config = with_choices_of(begun, config)
                job = prepare(config, loaded=loaded, rows=rows, score=score)
                if begun is not None:
                    job.optimizer.settings = with_sources_of(begun.header, job.optimizer.settings)
                check_shareable(job, processes)
            try:
                job.loaded.files.check()  # what was measured is not of another base
                job = job.with_lr(
                    *processes.first([float(job.config.method.options["lr"])])
                )  # trials may be rounded otherwise here
                processes.check_same(shared_header(job))
                with Interruption() as interruption:
                    return Loop(
                        job, folder, listeners, interruption, processes, said, accept_scorer=accept_scorer
                    ).run()
            except BaseException:
                if loaded is not None:
                    job.optimizer.close()  # the model is the caller's, and free again
                raise
        finally:
            processes.close()


class _OfThisBase:
    """A factor store that takes nothing that was computed since a file of the base changed.

    Args:
        store: keeps the rest.
        files: of the base.
    """

    def __init__(self, store: FactorStore, files: BaseFiles) -> None:
        self._store, self._files = store, files

    def load(self, kind: str, step: int) -> StoredTensors | None:
        return self._store.load(kind, step)

    def save(self, kind: str, step: int, stored: StoredTensors) -> None:
        self._files.check()
        self._store.save(kind, step, stored)


ALIKE = "alike"
"""Key of the warning that all answers of a step scored alike, which a run gives once, as those of `GAPS`."""
CHECKED_ROWS = 8
"""Training rows that the objective is measured on before the run; at least one of them must have a score."""
COMPARE_EVERY = 100
"""Steps between checks that all processes have the same parameters."""


class Loop:
    """One run of a job.

    Args:
        job: what `prepare` returned.
        folder: where the result goes.
        listeners: told of everything, in order, after the folder has it.
        interruption: whether the process was asked to end.
        processes: that share the run.
        said: warnings of the library so far; it grows.
        accept_scorer: whether the run may go on with another scorer than before.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        listeners: Sequence[Listener],
        interruption: Interruption,
        processes: ProcessGroup,
        said: Iterable[str] = (),
        *,
        accept_scorer: bool = False,
    ) -> None:
        self.job = job
        self.said = said
        self.accept_scorer = accept_scorer
        self.meter = current()
        self.settings = job.config.train
        self.folder = folder
        self.listeners = listeners
        self.interruption = interruption
        self.processes = processes
        self.sampler = job.sampler()
        self.lr = float(job.optimizer.param_groups[0]["lr"])
        self.resumed = ResumeState()
        self.evaluations = Evaluations(job, folder, listeners)
        self.best = BestState(job, folder, self.evaluations, listeners, processes)
        self.step_seconds = 0.0
        self._said: set[str] = set()
        self._device = job.loaded.device

    def run(self) -> dict[str, Any]:
        """Everything, from the first evaluation to the saved result."""
        try:
            return self._run()
        except ScorerError as error:
            self.folder.append_failed(error.lines)
            raise
        finally:
            self.folder.close()
            if self.job.reward is not None:
                self.job.reward.close()
            for listener in self.listeners:
                listener.closed()

    def _run(self) -> dict[str, Any]:
        with self.meter.phase(OBJECTIVE):
            check_objective(self.job, self._metrics_of_some)
            self.job = with_settled_scorer(self.job)
        with self.meter.phase(OPENING):
            self.resumed = self._open()
        self.evaluations.known = dict(self.resumed.evaluations)
        self.evaluations.answers = dict(self.resumed.answers)
        self.evaluations.row_losses = dict(self.resumed.row_losses)
        self.evaluations.earlier = frozenset(self.resumed.earlier)
        self.best.begin(self.resumed)
        unfit = reading(f"{self.folder.path}: its newest checkpoint does not fit the run", "delete that checkpoint")
        with unfit, self.meter.phase(OPENING):
            start = self._restore_checkpoint(self.resumed)
        for listener in self.listeners:
            listener.started(self.job)
            if self.resumed.begun:
                listener.resumed(self.evaluations.known)
        with self.meter.phase(BEFORE):
            before = self.evaluations.of("test", 0)
            untuned = self.evaluations.untuned(start)
            own_before = self.evaluations.of_own_answers(0)
        (untuned_loss,) = self.processes.first([before["loss"]])
        self.job.optimizer.unperturbed_loss, self.job.optimizer.warn = untuned_loss, self._warn
        with self.meter.phase(STEPS):
            steps, decision = self._steps(start, before)
        self._check_ranks(steps)
        self.best.restore()
        with self.meter.phase(AFTER):
            after = self.evaluations.of("test", steps)
            own_after = None if own_before is None else self.evaluations.of_own_answers(steps)
        if not math.isfinite(after["loss"]):
            raise NonFiniteResultError(steps, after["loss"])
        with self.meter.phase(AFTER):
            calibration = self.evaluations.calibration(steps)
        return self._finish(steps, decision, before, after, untuned, (own_before, own_after), calibration)

    def _open(self) -> ResumeState:
        """Opens the folder; the first rank puts it in order before the others read it."""
        with self.processes.together("open the run folder"):
            state = self._open_folder() if self.processes.is_first else None
        with self.processes.together("read the run folder"):  # before the first rank writes again
            return state or self._open_folder()

    def _open_folder(self) -> ResumeState:
        job = self.job
        header = log_header(job) | {
            "notices": list(job.notices)
        }  # notices are of this process: others may have measured something else
        state = self.folder.open(header)
        notices = check_same(state.header, header, job.optimizer) if state.begun else []
        change = changed_scorer(job, state, self.folder, accepted=self.accept_scorer) if state.begun else None
        if change is not None:
            self.folder.append_scorer(change)
        notices += [f"train.reward: {text}" for text in change_texts(as_json(state.scorers))]
        if state.begun and (total := new_total(state, self.settings.num_steps)) is not None:
            self.folder.append_total(total)
            state = replace(state, totals=[*state.totals, total], end=None)
        notices += map(in_words, state.totals)
        start = 0 if state.checkpoint is None else state.checkpoint.step
        if start < len(state.steps) and job.optimizer.by_gradients:
            name = job.config.method.name
            notices.append(f"steps {start + 1} to {len(state.steps)} are taken again: {name} has no log to replay.")
        first = [str(text) for text in state.header.get("notices", [])]  # of what is not measured again
        self.folder.describe(dump_config(job.config), parameter_table(job.model, job.optimizer))
        job.optimizer.set_factor_store(_OfThisBase(self.folder.factor_files, job.loaded.files))
        self.meter.add_earlier(state.elapsed, state.passes)
        new = [text for text in job.notices if text not in first]
        self.job = replace(job, notices=(*first, *new, *notices, *state.notices))
        return state

    def _restore_checkpoint(self, state: ResumeState) -> int:
        """Puts the newest checkpoint back; returns the number of steps that it had."""
        self.step_seconds = state.seconds
        if state.checkpoint is None:
            return 0
        step = state.checkpoint.step
        parts: dict[str, dict[str, Tensor]] = {"run": {}, "best": {}}
        for key, value in state.checkpoint.tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = value
        since = self.best.load(parts["best"], state.checkpoint.state, step)
        self.job.optimizer.load_resumable_state(parts["run"], state.steps[:step], since)
        return step

    def _steps(self, start: int, before: Metrics) -> tuple[int, Decision]:
        """All steps from `start` on, with their evaluations and checkpoints; how many the run has then, and why."""
        settings = self.settings
        keep_every = interval(settings.checkpoint_every, settings)
        self.meter.report(start, settings.num_steps, STEPS)
        if start == 0:
            self.best.note(before)
        self._apply(self.best.logged())  # a return that was logged right after the step of the checkpoint
        for steps in range(start + 1, settings.num_steps + 1):
            self._step(steps - 1)
            self.meter.report(steps, settings.num_steps, STEPS)
            had_ended = self.resumed.end is not None and steps == self.resumed.end.steps
            last = steps == settings.num_steps or self._any(self._asked_to_stop())
            self.best.note(last=last or had_ended)
            if self.best.history.dev_loss is not None:
                optimizer, losses = self.job.optimizer, [self.best.history.dev_loss]
                losses += [] if optimizer.unperturbed_loss is None else [optimizer.unperturbed_loss]
                optimizer.unperturbed_loss = min(losses)
            last = last or self._any(self._asked_to_stop())  # by what it was told of the evaluation
            decision = CONTINUE if last else self.best.decision()
            if last or had_ended or isinstance(decision, Stop):
                self.best.note_last()
                return steps, decision
            self._apply(decision)
            interrupted = self._any(self.interruption.signal is not None)
            if interrupted or (keep_every and steps % keep_every == 0):
                self._keep(steps)
            if interrupted:
                by = self.interruption.signal or "a signal to another rank"
                raise RunInterrupted(by, steps, self.folder.path)
        self.best.note(last=True)  # of a run that is to have no more steps than it has
        return start, CONTINUE

    def _apply(self, decision: Decision) -> None:
        if isinstance(decision, Rollback):
            self.best.roll_back(decision)

    def _any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.processes.max([float(flag)])[0] > 0

    def _keep(self, steps: int) -> None:
        if steps <= len(self.resumed.steps):
            return  # a step that is taken again
        tensors = {f"run/{key}": value for key, value in self.job.optimizer.resumable_state().items()}
        best, state = self.best.saved()
        tensors |= {f"best/{key}": value for key, value in best.items()}
        self.folder.save_checkpoint(Checkpoint(steps, tensors, state))

    def _step(self, step: int) -> None:
        for listener in self.listeners:
            listener.stepping(step)
        optimizer = self.job.optimizer
        measured: Mapping[str, Any] = {}
        if step < len(self.resumed.steps) and not optimizer.by_gradients:
            optimizer.replay(self.resumed.steps[step])
        else:
            measured = self._measured_step(step)
        record = optimizer.last_step
        assert record is not None
        self.best.history.add_step(record)
        progress = Progress(record, self.step_seconds, peak_memory(self._device))
        self._log_step(progress, measured)
        for listener in self.listeners:
            listener.stepped(progress)

    def _warn(self, text: str) -> None:
        """Says something of the run that was not known at its start."""
        self.job = replace(self.job, notices=(*self.job.notices, text))
        for listener in self.listeners:
            listener.warned(text)

    def _log_step(self, progress: Progress, measured: Mapping[str, Any]) -> None:
        record, settings = progress.record, self.settings
        taken = record.step + 1
        if measured or taken % settings.log_every == 0:
            line = {
                "loss": record.loss,
                "projected_grads": list(record.projected_grads),
                "lr": record.lr,
                "seconds": round(progress.seconds, 3),
                "elapsed": round(self.meter.seconds, 3),
                "passes": round(self.meter.passes, 2),
                "memory": progress.memory,
                **measured,
            }
            self.folder.append_metrics(taken, line)  # before the log: a step that is in the log is not measured again
        self.folder.append_step(record)

    def _measured_step(self, step: int) -> Mapping[str, Any]:
        """Takes a step; returns what it found beside its losses, as JSON."""
        indices = self.sampler.rows(step)
        started = time.perf_counter()
        with memory_for(f"step {step}", [self.job.train[i] for i in indices], "train.batch_size"):
            try:
                measured = self._take_step(step, indices)
            except NonFiniteLossError:
                decision = decide_after_failure(self.best.history)
                if isinstance(decision, Stop):
                    if step == 0 and self.settings.minimises_loss:
                        check_untuned(self.job.loaded, self.job.objective, [self.job.train[i] for i in indices])
                    raise
                self._apply(decision)
                measured = self._take_step(step, indices)
        self.step_seconds += time.perf_counter() - started
        if (step + 1) % COMPARE_EVERY == 0:
            self._check_ranks(step + 1, sample=True)
        return measured

    def _check_ranks(self, steps: int, *, sample: bool = False) -> None:
        if self.processes.size > 1:
            self.processes.check_equal(digest(self.job.optimizer.resumable_state(), sample=sample), steps)

    def _take_step(self, step: int, indices: Sequence[int]) -> Mapping[str, Any]:
        job, optimizer, held_out = self.job, self.job.optimizer, self.job.held_out
        for group in optimizer.param_groups:
            group["lr"] = self.lr * lr_factor(step, self.settings) * self.best.history.lr_scale
        with job.loaded.files.unchanged():  # before anything of the step is logged
            if optimizer.planned(step)[0] == FEEDBACK:  # every rank takes it on all rows
                optimizer.step(job.objective.closure(job.model, job.batches(indices)))
                return {}
            closure = self._closure(step, indices)
            if held_out is not None:
                with self.meter.phase(BETWEEN):
                    held_out.evaluated()
            optimizer.step(closure)
            if held_out is not None:
                held_out.forget()
            if not isinstance(closure, RewardRows):
                return optimizer.metrics
            self.folder.append_scored(closure.lines())
            self._warn_of_scores(closure, step)
            return {**optimizer.metrics, **closure.told}

    def _warn_of_scores(self, rows: RewardRows, step: int) -> None:
        """Says, once each, that scores are missing, and that a step learnt nothing since all answers scored alike."""
        reward = self.job.reward
        for kind, reason in reward.gaps.items() if reward is not None else ():
            if kind not in self._said:
                self._said.add(kind)
                self._warn(f"{GAPS[kind]}, from step {step} on: {reason}.")
        if rows.are_alike and ALIKE not in self._said:
            self._said.add(ALIKE)
            nothing = "all answers to each prompt scored alike, so that there is nothing to learn from"
            self._warn(f"step {step}: {nothing}; {ways_from_alike(self.job.config.method.name)}.")

    def _closure(self, step: int, indices: Sequence[int]) -> Closure:
        """What a step minimises on these rows."""
        job, name = self.job, self.settings.objective
        if self.processes.size > 1 and self.settings.parallel == "rows":
            return shared_rows(job, indices, self.processes)
        if name == LOSS:
            return job.objective.closure(job.model, job.batches(indices), held_out=job.held_out)
        rows = [job.train[i] for i in indices]
        if job.reward is not None:
            return RewardRows(job.reward, job.model, job.objective, rows, step)
        return lambda: -self.evaluations.metrics(rows, written=True, step=step)[name]

    def _metrics_of_some(self) -> Metrics:
        return self.evaluations.metrics(self.job.train[:CHECKED_ROWS], written=True)

    def _asked_to_stop(self) -> bool:
        return any(listener.wants_stop for listener in self.listeners)

    def _in_common(self, steps: int, kept_step: int) -> dict[str, InCommon]:
        """Returns split -> the comparison of the evaluations before and after, where scores are missing."""
        parts = {"test": steps, **({"dev": kept_step} if self.job.dev else {})}
        found = {split: self.evaluations.in_common(split, 0, last) for split, last in parts.items()}
        return {split: common for split, common in found.items() if common is not None}

    def _finish(
        self,
        steps: int,
        decision: Decision,
        before: Metrics,
        after: Metrics,
        untuned: dict[str, Metrics],
        own_answers: tuple[float | None, float | None],
        calibration: dict[str, Any] | None,
    ) -> dict[str, Any]:
        kept = self.best.kept
        kept_step, dev_loss = kept if kept is not None else (steps, self.best.history.dev_loss)
        split = "test" if dev_loss is None else "dev"
        outcome = Outcome(
            steps,
            kept_step,
            dev_loss,
            self.step_seconds,
            self.job.optimizer.num_idle_steps,
            before,
            after,
            untuned,
            own_answers,
            calibration,
            self.evaluations.loss("test" if self.job.dev is self.job.test else "dev", 0),
            self.best.history.rollbacks,
            kept is not None,
            decision.reason if isinstance(decision, Stop) else None,
            self.evaluations.chance(split, kept_step, chosen=kept is not None),
            self._in_common(steps, kept_step),
            self.resumed.scorers,
            self.evaluations.by_one_scorer("test", 0, steps),
        )
        files = self.job.loaded.files
        files.check(by_content=True)
        self.folder.append_end(End(outcome.steps, outcome.kept_step))
        # in this order: saving a whole model merges the change into it
        job = self.job
        prompt = prompt_text(job.config, job.loaded.kind)
        remarks = change_texts(as_json(self.resumed.scorers))
        tuning = Tuning(job.config.method.name, outcome.kept_step, row_counts(job), before, after, prompt, remarks)
        with self.meter.phase(SAVING), files.unchanged():
            result = save_result(job.config.model, job.loaded, job.optimizer, self.folder.result, tuning)
        first, last = (self.evaluations.answers.get(("test", step), ()) for step in (0, steps))
        answers = compare(self.job.test, first, last)
        job = replace(job, notices=(*job.notices, *self.said))
        summary = summarize(job, outcome, self.processes, result, self.meter.phases)
        with self.meter.phase(SAVING):
            self.folder.finish(summary, answers)
        for listener in self.listeners:
            if answers is not None:
                listener.compared(answers)
            listener.finished(summary)
        return summary
