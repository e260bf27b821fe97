"""The library from Python: `train`, `open_run` and `load_adapter`."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from tezo.methods import AUTO, HEAD_FEEDBACK
from tezo.models import lora
from tezo.models.kinds import IN_MEMORY, ModelConfig
from tezo.models.loading import LoadedModel, from_objects
from tezo.optim.closures import Closure, RowLosses
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.runs.files import MANIFEST, resume_line_of
from tezo.runs.folder import CONFIG, LOG, read_summary
from tezo.runs.replayed import is_replayed
from tezo.system.errors import RequestError, RunError, RunInterrupted, resume_words
from tezo.system.progress import quieted, showing
from tezo.system.values import coerce, path_of, takes
from tezo.tasks.scorers import as_scorer
from tezo.tasks.scoring import Score
from tezo.tasks.splits import Rows, read_splits
from tezo.training import loop
from tezo.training.choices import Choices, resolve
from tezo.training.job import Job, build_method, parse_method
from tezo.training.listeners import Listener
from tezo.training.opening import TunedModel, check_is_run
from tezo.training.rows_of_steps import ClosureRows
from tezo.training.run import Run as Run
from tezo.training.screen import Screen
from tezo.training.settings import (
    Config,
    Options,
    absolute_setting,
    dotted_settings,
    overlay,
    parse_config,
    read_run_config,
)

logger = logging.getLogger(__name__)


def train(
    model: Any,
    data: Rows | None = None,
    *,
    method: str = AUTO,
    reward: Score | Sequence[Score] | str | None = None,
    tokenizer: Any = None,
    output: str | Path | None = None,
    dev: Rows | None = None,
    test: Rows | None = None,
    resume: bool = False,
    accept_scorer: bool = False,
    listeners: Sequence[Listener] = (),
    progress: bool = True,
    settings: Mapping[str, Any] | None = None,
    **named: Unpack[Options],
) -> Run:
    """Tunes a model on rows, from start to end.

    Args:
        model: a folder, a hub name, or a model of transformers in memory. One in memory is tuned itself, where it is
            and in its dtype; it is put into evaluation mode. `Run` says how it is afterwards.
        data: rows to train on: a file, the name of a hub data set, a list of dicts, a DataFrame of pandas, or a split
            of a `datasets` data set. None where the setting `task` names them.
        method: name of a method, see `tezo.METHODS`, or "adam"; "auto": with a causal model policy-gradient for a
            reward and gauss-newton for labels or free text; else head-feedback. No other setting changes it; an option
            that it does not have is refused.
        reward: what is maximised in place of the likelihood of answers: a function (prompt, completion, fields of the
            row) -> score, a list of functions, whose scores are added, or FILE.py:FUNCTION. The model writes the
            completions; rows need only prompts.
        tokenizer: of a model in memory.
        output: run folder, new; None: a temporary one, removed with the `Run` or at the end of the process, and kept
            where the run is interrupted: the error names it.
        dev: rows that choose the parameters to keep; as `data`. A name may be a split of the hub data set.
        test: rows for the figures before and after; likewise. Without dev rows some of `data` are held
            out; without test rows the dev rows count.
        resume: go on with the run in `output`, to the bit as if it had never stopped; start it where there is none.
            Objects must be given again, a model with the weights that the run began with. With another number of
            `steps` the run has these from then on, also where it had ended.
        accept_scorer: whether a run may go on with another `reward` than before; its log, summary and card say so.
        listeners: told of every step and evaluation; `tezo.trainer.callbacks` has one for those of
            transformers.
        progress: whether standard error shows what the run does: a line that is overwritten on a terminal and in a
            notebook, elsewhere a line every few seconds. The `Run` has it as an attribute for what follows.
        settings: any others by their dotted keys, such as {"data.seed": 3}; docs/settings.md has them all.
        named: the same by the last part of a key, see `Options`: `lr=1e-4, rank=8, steps=200`. `seed` is train.seed.

    Returns:
        The finished run.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        NonFiniteLossError: a loss was NaN or infinite.
        RunInterrupted: Ctrl-C, or SIGTERM, came during the run, which can be resumed. A KeyboardInterrupt.
        RunError: something could not be written; the run can be resumed.
            After any error a model in memory is as before, unless the method writes weights or has an adapter of PEFT.
    """
    parts = {part: rows for part, rows in (("train", data), ("dev", dev), ("test", test)) if rows is not None}
    if not isinstance(settings or {}, Mapping):
        raise RequestError(f"settings is {settings!r}; give a dictionary, such as {{'data.seed': 3}}.")
    if isinstance(listeners, Listener):
        raise RequestError(f"listeners is a {type(listeners).__name__}; give a list of them.")
    for listener in listeners or ():
        if not isinstance(listener, Listener):
            raise RequestError(
                f"listeners has {listener!r}, which is no tezo.training.listeners.Listener; a callback of transformers "
                "becomes one in TrainerCallbacks of tezo.trainer.callbacks."
            )
    given = dotted_settings(named, settings or {})
    if reward is not None:
        given.append(("train.reward", reward if isinstance(reward, str) else IN_MEMORY))
    scorer = absolute_setting("train.reward", as_scorer(reward))  # for evaluations by it
    score = None if isinstance(scorer, str) else scorer
    with quieted(not progress), showing(progress) as line:
        config, base = _configured(model, tokenizer, parts, method, given, keep=not resume)
        objects = {part: rows for part, rows in parts.items() if not isinstance(rows, str | Path)}
        rows = read_splits(config.data, objects) if objects else None
        folder = _folder(output, resume=resume)
        watcher = _Watcher()
        told = [*(listeners or ()), *([] if line is None else [Screen(line)]), watcher]
        try:
            summary = loop.train(
                config, folder, told, resume=resume, loaded=base, rows=rows, score=score, accept_scorer=accept_scorer
            )
        except BaseException as error:
            if output is None:
                _leave(folder, error)
            raise
    return Run(
        folder,
        summary,
        base=base,
        tuned=watcher.tuned,
        rows=rows,
        reward=scorer,
        temporary=output is None,
        trust_remote_code=config.model.trust_remote_code,
        progress=progress,
    )


def prepare(
    model: Any,
    closures: Callable[[int], Closure],
    *,
    steps: int,
    method: str = HEAD_FEEDBACK,
    held_out: RowLosses | None = None,
    seed: int = 0,
    **options: Any,
) -> ZerothOrderOptimizer:
    """Makes the optimizer of a method for a training loop in Python; what is open is filled in as `train` does.

        optimizer = tezo.prepare(model, lambda step: tezo.closure(model, batches[step]), steps=200)
        print(optimizer.settings)
        for step in range(200):
            optimizer.step(tezo.closure(model, batches[step]))

    Args:
        model: of torch.
        closures: function of a step that returns its closure. Closures of `tezo.closure` can tell the losses of rows.
        steps: number of steps of the loop, which feedback steps and the search for a rate depend on.
        method: name of a zeroth-order method.
        held_out: rows that learning rates are compared on, a closure of `tezo.closure`; without them a rate that is
            open is the method's default.
        seed: of all draws.
        options: of the method, and `feedback_first` and `feedback_last`; see docs/settings.md.

    Raises:
        RequestError: an option is unknown or wrong, or the model cannot be tuned this way.
    """
    steps, seed = (coerce(name, value, int) for name, value in (("steps", steps), ("seed", seed)))
    if steps < 1:
        raise RequestError(f"steps is {steps}; it must be at least 1.")
    if held_out is not None and not isinstance(held_out, RowLosses):
        raise RequestError("held_out must tell the loss of each row; give tezo.closure(model, batch).")
    if not takes(closures, 0):
        raise RequestError("closures: give a function of a step, lambda step: tezo.closure(model, batches[step]).")
    if not takes(first := closures(0)):
        raise RequestError(f"closures(0) is {type(first).__name__}; give a function that returns a step's closure.")
    config = parse_method(method, options)
    size = getattr(first, "examples", 1)
    config = replace(config, train=replace(config.train, steps=steps, batch_size=size, seed=seed))

    def made(settings: Config) -> ZerothOrderOptimizer:
        optimizer = build_method(settings, model, seed)
        optimizer.set_passes(lambda step: closures(step)())
        return optimizer

    found = resolve(Choices(config), ClosureRows(closures, held_out), made)
    for notice in found.notices:
        logger.info(notice)
    return found.optimizer


def open_run(folder: str | Path, *, model: Any = None, tokenizer: Any = None, trust_remote_code: bool = False) -> Run:
    """A run that has ended, by its folder; its model is loaded at first use.

    Args:
        folder: run folder.
        model: the base model, where it is not to be found as the run names it: a folder, a hub name, or a model of
            transformers in memory, which the run's adapter is then attached to. It is not used where the run has saved
            a whole model.
        tokenizer: of a model in memory.
        trust_remote_code: whether code that comes with the model may run; what the run says of it does not count.

    Raises:
        RequestError: there is no run in the folder, it has not ended, or a file is damaged.
    """
    path = path_of("folder", folder)
    check_is_run(path)
    summary = read_summary(path)
    if summary is None and is_replayed(path):
        summary = {}
    if summary is None:
        raise RequestError(
            f"{path} is of a run that has not ended (it has no {MANIFEST}); `{resume_line_of(path)}` goes on (in "
            "Python, resume=True of tezo.train)."
        )
    if model is None or isinstance(model, str | Path):
        if tokenizer is not None:
            raise RequestError("tokenizer is of a model in memory; give that as model, or leave the tokenizer out.")
        name = None if model is None else str(model)
        return Run(path, summary, base=name, trust_remote_code=trust_remote_code)
    kind = read_run_config(path / CONFIG, []).model.kind
    return Run(path, summary, base=from_objects(model, tokenizer, kind, keep=False))


def load_adapter(model: Any, folder: str | Path) -> list[lora.Handle]:
    """Attaches an exported adapter to its base model, in the forward pass; the weights are only read.

    Args:
        model: the base model, of torch.
        folder: what `export_adapter`, `Run.export` or `tezo export` wrote, or `adapter/` of a run folder.

    Returns:
        Handles of the hooks; `remove()` of all of them takes the adapter off.

    Raises:
        RequestError: a file is missing or damaged, the adapter is of another model, or one is attached already.
    """
    if not isinstance(model, nn.Module):
        raise RequestError(f"model is {model!r}; give the base model itself, as transformers loads it.")
    if lora.has_adapter(model):
        raise RequestError("model has an adapter attached already; remove() its handles first.")
    path = path_of("folder", folder)
    adapter = lora.load_adapter(path)
    lora.check_base(path, model)
    return lora.attach_adapter(model, adapter)


def _configured(
    model: Any,
    tokenizer: Any,
    parts: Mapping[str, Rows],
    method: str,
    settings: Sequence[tuple[str, Any]],
    *,
    keep: bool,
) -> tuple[Config, LoadedModel | None]:
    """(the configuration, the base model where it is in memory)."""
    if "train" not in parts and "data.task" not in dict(settings):
        raise RequestError("data is not set; give rows, or the setting task for one of `tezo tasks`.")
    by_name = isinstance(model, str | Path)
    name = str(model) if by_name else IN_MEMORY
    sources = [
        (f"data.{part}", str(rows) if isinstance(rows, str | Path) else IN_MEMORY) for part, rows in parts.items()
    ]
    config = parse_config(overlay({}, [("model.name", name), ("method.name", method), *sources, *settings]))
    if not by_name:
        return _with_object(config, model, tokenizer, keep=keep)
    if tokenizer is not None:
        raise RequestError(f"tokenizer is given, and model is the name {name}, which has a tokenizer; leave it out.")
    return config, None


_OF_LOADING = ("engine", "workers", "dtype", "device", "quantization", "placement", "untie_head", "trust_remote_code")


def _with_object(config: Config, model: Any, tokenizer: Any, *, keep: bool) -> tuple[Config, LoadedModel]:
    for key in _OF_LOADING:
        value = getattr(config.model, key)
        if value != getattr(ModelConfig, key):
            raise RequestError(f"model.{key} is {value!r}, and model is an object, taken as it is; leave it out.")
    base = from_objects(model, tokenizer, config.model.kind, keep=keep)
    name = getattr(model, "name_or_path", "") or IN_MEMORY
    return replace(config, model=replace(config.model, name=name, kind=base.kind)), base


def _folder(output: str | Path | None, *, resume: bool) -> Path:
    if output is not None:
        return path_of("output", output).absolute()
    if resume:
        raise RequestError("resume is set, and output is not; give the folder of the run to go on with.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RequestError("output is not set, and several processes need one folder to share; give it.")
    return Path(tempfile.mkdtemp(prefix="tezo-")).absolute()


def _leave(folder: Path, error: BaseException) -> None:
    """Keeps the temporary folder of a run that can go on, and has the error name it; removes any other."""
    stopped = isinstance(error, RunInterrupted)
    ended = isinstance(error, RunError | KeyboardInterrupt) and getattr(error, "exit_code", 1) != RequestError.exit_code
    if not ended or not (folder / LOG).is_file():
        shutil.rmtree(folder, ignore_errors=True)
    elif not stopped:
        error.add_note(resume_words(folder))


class _Watcher(Listener):
    """Keeps hold of what is tuned."""

    def __init__(self) -> None:
        self._job: Job | None = None

    def started(self, job: Job) -> None:
        self._job = job

    @property
    def tuned(self) -> TunedModel | None:
        """The tuned model; None where the run had ended before."""
        if self._job is None:
            return None
        return TunedModel(self._job.loaded, self._job.optimizer.merge, self.release)

    def release(self) -> None:
        """Takes the optimizer's hooks off the model."""
        if self._job is not None:
            self._job.optimizer.close()
