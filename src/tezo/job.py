"""From a configuration to everything a run needs, before anything is written: model, data, optimizer, plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from tezo.config import Config, DataConfig
from tezo.errors import RequestError
from tezo.methods import method
from tezo.models import LoadedModel, load_model
from tezo.objectives import Batch, Encoded, Objective, objective_for
from tezo.optimizer import ZerothOrderOptimizer
from tezo.params import find_targets, never_called
from tezo.tasks import Example, Fields, Format, LabelFormat, Row, choose_format, hold_out, per_class, read_rows


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
        notices: what the user should know before the start: cuts, parameters left out, held-out rows.
    """

    config: Config
    loaded: LoadedModel
    format: Format
    objective: Objective
    train: list[Encoded]
    dev: list[Encoded]
    test: list[Encoded]
    optimizer: ZerothOrderOptimizer
    notices: tuple[str, ...] = field(default=())

    @property
    def model(self) -> Any:
        """The model being tuned."""
        return self.loaded.model

    def batches(self, indices: Sequence[int]) -> list[Batch]:
        """These training rows, ready for `objective.loss`."""
        return self.objective.batches([self.train[i] for i in indices])


def prepare(config: Config) -> Job:
    """Loads, reads, encodes and plans; raises `RequestError` for whatever does not fit."""
    notices: list[str] = []
    rows = {"train": _read(config.data, "train"), "dev": _read(config.data, "dev"), "test": _read(config.data, "test")}
    loaded = load(config)
    form = make_format(config, loaded, rows["train"])
    examples = {name: [form.example(row) for row in part] for name, part in rows.items()}
    examples = _sample(config, form, examples, notices)
    objective = objective_for(loaded, options_of(form), config.data.max_length)
    encoded = {name: [objective.encode(example) for example in part] for name, part in examples.items()}
    notices += cut_notices(objective)
    objective.adapt(loaded.model, encoded["train"])
    optimizer = _optimizer(config, loaded, objective, encoded["train"], notices)
    return Job(
        config=resolve(config, form),
        loaded=loaded,
        format=form,
        objective=objective,
        train=encoded["train"],
        dev=encoded["dev"],
        test=encoded["test"] or encoded["dev"],
        optimizer=optimizer,
        notices=tuple(notices),
    )


def load(config: Config) -> LoadedModel:
    """The base model of a configuration."""
    m = config.model
    return load_model(m.name, kind=m.kind, dtype=m.dtype, device=m.device, trust_remote_code=m.trust_remote_code)


def make_format(config: Config, loaded: LoadedModel, rows: Sequence[Row]) -> Format:
    """The format of a configuration's rows."""
    named = {f.name: getattr(config.data, f.name) for f in fields(Fields)}
    return choose_format(rows, loaded.kind, Fields(**named), lambda messages: render_chat(loaded.tokenizer, messages))


def options_of(form: Format) -> tuple[str, ...]:
    """What a format's examples choose among; empty for free text."""
    if not isinstance(form, LabelFormat):
        return ()
    return form.options


def resolve(config: Config, form: Format) -> Config:
    """The configuration with the data's shape and labels filled in, so that it means the same on other rows."""
    if isinstance(form, LabelFormat):
        data = replace(config.data, shape="label", template=form.template, label_words=dict(form.words))
    else:
        shape = form.shape
        assert shape != "task"
        data = replace(config.data, shape=shape)
    return replace(config, data=data)


def render_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The prompt that asks for the next message."""
    if tokenizer.chat_template is None:
        raise RequestError(
            "data.messages: the tokenizer of this model has no chat template; use a chat model, or rows with "
            "'prompt' and 'completion'."
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def cut_notices(objective: Objective) -> list[str]:
    """What was cut off long prompts, in words."""
    cuts = objective.cuts
    if not cuts.rows:
        return []
    return [
        f"{cuts.rows} prompt(s) are longer than {objective.max_length} tokens ({'; '.join(cuts.examples)}): "
        f"{cuts.tokens} tokens cut, {objective.side_cut}. data.max_length sets the bound."
    ]


def _read(data: DataConfig, name: str) -> list[Row]:
    source = getattr(data, name)
    if source is None:
        return []
    if name == "train":
        return read_rows(source, key="data.train", split=data.train_split, subset=data.subset)
    return read_part(data, source, key=f"data.{name}")


def read_part(data: DataConfig, source: str, key: str = "data") -> list[Row]:
    """The rows of `source`: a file, or a split of the hub data set that is trained on."""
    if Path(source).suffix == "" and not Path(source).exists() and not Path(data.train).exists():
        return read_rows(data.train, key=key, split=source, subset=data.subset)
    return read_rows(source, key=key)


def _sample(
    config: Config, form: Format, examples: dict[str, list[Example]], notices: list[str]
) -> dict[str, list[Example]]:
    data, seed = config.data, config.train.seed
    sampled = dict(examples)
    if not examples["dev"] and not examples["test"]:
        sampled["train"], sampled["dev"] = hold_out(examples["train"], data.hold_out, seed)
        notices.append(
            f"{len(sampled['dev'])} of {len(examples['train'])} training rows are held out for evaluation; "
            "data.dev and data.test name rows of your own."
        )
    if data.per_class is not None:
        if not form.labels:
            raise RequestError("data.per_class is set, but these rows have no labels; leave it out.")
        sampled["train"] = per_class(sampled["train"], data.per_class, form.labels, seed)
    return sampled


def _optimizer(
    config: Config, loaded: LoadedModel, objective: Objective, train: Sequence[Encoded], notices: list[str]
) -> ZerothOrderOptimizer:
    options = dict(config.method.options)
    batch = objective.collate(train[:1])
    with torch.no_grad():
        unused = never_called(find_targets(loaded.model), lambda: objective.loss(loaded.model, batch))
    for target in unused:
        target.parameter.requires_grad_(False)
    if unused:
        names = ", ".join(target.name for target in unused[:3])
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        notices.append(f"left untrained, since the loss does not depend on them: {names}{more}.")
    return method(config.method.name).build(loaded.model, seed=config.train.seed, **options)
