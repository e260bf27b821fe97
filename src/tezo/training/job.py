"""From a configuration to everything a run needs, before anything is written: model, data, optimizer, plan."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tezo.directions.bases import Passes
from tezo.directions.targets import ALL, find_targets, never_called
from tezo.errors import RequestError
from tezo.models.loading import LoadedModel, load_model
from tezo.models.peft_adapters import add_adapter
from tezo.numerics.random import permutation
from tezo.optim.learning_rate import PARTS, choose_lr
from tezo.optim.methods import AUTO, Tuner, method
from tezo.optim.optimizer import ZerothOrderOptimizer
from tezo.tasks import Example, Format, LabelFormat, Row, parts
from tezo.tasks.objectives import Batch, Encoded, Objective
from tezo.tasks.setup import make_format, make_objective
from tezo.tasks.splits import Splits, divide, read_splits
from tezo.tasks.token_notices import token_notices
from tezo.training.feedback_schedule import settle_feedback
from tezo.training.recipe import Config
from tezo.training.schedule import BatchSampler

BASIS_ROWS = 64
"""Training rows that a basis which sees the data looks at: as many as two steps of 16 rows pass."""

LOSS = "loss"
"""The objective that batches have of themselves; any other is a metric."""


@dataclass(frozen=True)
class Job:
    """A run, ready to start.

    Attributes:
        config: resolved: the data's shape and labels filled in.
        loaded: model, tokenizer, kind.
        format: rows -> examples.
        objective: examples -> losses.
        train: rows to step on.
        dev: rows that choose the checkpoint; may be empty.
        test: rows for the figures before and after.
        optimizer: on the model.
        untrained: parameters that the loss does not depend on.
        notices: what the user should know before the start: cuts, label words that are alike, parameters left out,
            held-out rows.
    """

    config: Config
    loaded: LoadedModel
    format: Format
    objective: Objective
    train: list[Encoded]
    dev: list[Encoded]
    test: list[Encoded]
    optimizer: Tuner
    untrained: tuple[str, ...] = ()
    notices: tuple[str, ...] = field(default=())

    @property
    def model(self) -> Any:
        """The model being tuned."""
        return self.loaded.model

    def sampler(self) -> BatchSampler:
        """Which training rows a step takes, by train.order."""
        train = self.config.train
        strata = [row.example.label if train.order == "stratified" else None for row in self.train]
        return BatchSampler(strata, train.batch_size, train.seed)

    def batches(self, indices: Sequence[int]) -> list[Batch]:
        """These training rows, ready for `objective.loss`."""
        return self.objective.batches([self.train[i] for i in indices])


def prepare(config: Config, loaded: LoadedModel | None = None, rows: Splits | None = None) -> Job:
    """Loads, reads, encodes and plans; raises `RequestError` for whatever does not fit.

    Args:
        config: of the run.
        loaded: the base, where it is in memory already; None: as the configuration names it.
        rows: likewise, before any is chosen.
    """
    notices: list[str] = []
    found = read_splits(config.data) if rows is None else rows
    loaded = load_for_tuning(config, loaded)
    notices += loaded.notices
    form = make_format(config.data, loaded, found.train)
    rows = divide(found, form, config.data, config.train.seed)
    notices += rows.notices
    objective = make_objective(config.data, loaded, form)
    learnt = form.training_example if config.train.objective == LOSS else form.example
    train = [objective.encode(learnt(row)) for row in rows.train]
    dev, test = ([objective.encode(form.example(row)) for row in part] for part in (rows.dev, rows.test))
    _check_use(config, train, dev)
    notices += token_notices(objective)
    objective.adapt(loaded.model, train)
    untrained = _untrained(loaded, objective, train, notices)
    optimizer = make_optimizer(config, loaded, untrained)
    optimizer.set_calibration_passes(basis_passes(loaded, objective, train, config.train.seed))
    few = objective.closure(loaded.model, objective.batches(train[: config.train.batch_size]))
    labelled, is_loss = all(row.example.label is not None for row in train), config.train.objective == LOSS
    config, told = settle_feedback(config, optimizer, few, labelled=labelled, objective_is_loss=is_loss)
    notices += told
    job = Job(
        config=resolve(config, form),
        loaded=loaded,
        format=form,
        objective=objective,
        train=train,
        dev=dev,
        test=test or dev,
        optimizer=optimizer,
        untrained=tuple(untrained),
        notices=tuple(notices),
    )
    return _with_measured_lr(job, [*rows.dev, *rows.train], learnt) if config.method.options.get("lr") == AUTO else job


def _check_use(config: Config, train: Sequence[Encoded], dev: Sequence[Encoded]) -> None:
    """An error where a setting is of rows, or of parts of rows, that there are not."""
    settings = config.train
    if settings.order == "stratified" and any(row.example.label is None for row in train):
        raise RequestError("train.order is stratified, and these rows have no labels; leave it at shuffled.")
    if settings.patience is not None and not dev:
        raise RequestError(f"train.patience is {settings.patience}, and there are no dev rows; give data.dev.")


def _with_measured_lr(job: Job, rows: Sequence[Row], learnt: Callable[[Row], Example]) -> Job:
    """The job with a learning rate measured on some of these rows, which no step has seen yet."""
    settings, optimizer, objective = job.config.train, job.optimizer, job.objective
    assert isinstance(optimizer, ZerothOrderOptimizer)
    size = min(settings.batch_size, len(rows) // 2)  # no pass takes more memory than a step's
    if size == 0:
        raise RequestError(f"method.lr is auto, and there are {len(rows)} rows to measure it on; give a number.")
    drawn = parts(rows, [size] * min(PARTS, len(rows) // size), settings.seed, "step size")
    batches = [objective.batches([objective.encode(learnt(row)) for row in part]) for part in drawn]
    found = choose_lr(optimizer, [objective.closure(job.model, part) for part in batches], size, settings.batch_size)
    for group in optimizer.param_groups:
        group["lr"] = found.lr
    method = replace(job.config.method, options={**job.config.method.options, "lr": found.lr})
    return replace(job, config=replace(job.config, method=method), notices=(*job.notices, found.notice))


def load(config: Config) -> LoadedModel:
    """The base model of a configuration."""
    m = config.model
    return load_model(
        m.name,
        kind=m.kind,
        dtype=m.dtype,
        device=m.device,
        quantization=m.quantization,
        placement=m.placement,
        trust_remote_code=m.trust_remote_code,
    )


def load_for_tuning(config: Config, loaded: LoadedModel | None = None) -> LoadedModel:
    """The base, or the one that is given, with a new adapter of PEFT where the configuration asks for one."""
    return add_adapter(loaded or load(config), config.model, config.train.seed)


def resolve(config: Config, form: Format) -> Config:
    """The configuration with the data's shape and labels filled in, so that it means the same on other rows.

    A template that was not given is left open: it follows data.text, which other rows may have by another name.
    """
    if isinstance(form, LabelFormat):
        data = replace(config.data, shape="label", label_words=dict(form.words))
    elif form.shape != "task":
        data = replace(config.data, shape=form.shape)
    else:
        data = config.data
    return replace(config, data=data)


def _untrained(loaded: LoadedModel, objective: Objective, train: Sequence[Encoded], notices: list[str]) -> list[str]:
    """Parameters that the loss does not depend on."""
    batch = objective.collate(train[:1])
    with torch.no_grad():
        unused = never_called(find_targets(loaded.model), lambda: objective.loss(loaded.model, batch))
    if unused:
        names = ", ".join(target.name for target in unused[:3])
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        notices.append(f"left untrained, since the loss calls none of their modules: {names}{more}.")
    return [target.name for target in unused]


def basis_passes(loaded: LoadedModel, objective: Objective, train: Sequence[Encoded], seed: int) -> Passes:
    """Step -> forward passes over `BASIS_ROWS` training rows, or all where there are fewer; others at each step."""

    def passes(refresh_step: int) -> None:
        chosen = permutation(len(train), seed=seed, step=refresh_step, name="basis")[:BASIS_ROWS]
        objective.losses(loaded.model, objective.batches([train[i] for i in chosen]), 1)

    return passes


def make_optimizer(config: Config, loaded: LoadedModel, untrained: Collection[str]) -> Tuner:
    """The method of a configuration on a model; `untrained` parameters are left alone."""
    options = {key: value for key, value in config.method.options.items() if (key, value) != ("lr", AUTO)}
    if config.model.peft != "none":
        options.setdefault("targets", (ALL,))
    wanted = method(config.method.name)
    targets = options.pop("targets", wanted.defaults()["targets"])
    targets = (*targets, *(f"!{name}" for name in untrained))
    return wanted.build(loaded.model, seed=config.train.seed, targets=targets, **options)
