"""The settings that a request leaves open: each choice a value and its reason, made once, in this order.

1. `choose_dtype`: the data type of the base, as it was found.
2. `choose_method`: by the model, the rows, the objective and the number of processes, never by what else is set. A
   basis with it, where the method's own cannot look at the layers of the model.
3. `choose_for_few`, where rows are too few to hold some out: the number of steps, and that the run does not go back;
   then `choose_size`: rows of a step, its schedule, and the number of steps, by the method and the number of rows;
   then `choose_columns`, as they were found.
4. `choose_rank`: the rank of a method that leaves it open, by the number of labels.
5. `choose_directions`: shared by the rows of a batch or per example, by whether the model can have the latter.
6. `choose_feedback`, `choose_guard`: feedback steps, and whether a run may go back.
7. `choose_rho`: the perturbation scale, measured.
8. `choose_rate`: the learning rate, searched for by short trials.

The first three decide which rows steps have; `resolve` makes the others, which are measured on these rows.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, get_args

import torch

from tezo.directions.bases.basis import Basis
from tezo.directions.targets import is_packed
from tezo.methods import AUTO, ES, GAUSS_NEWTON, HEAD_FEEDBACK, METHODS, POLICY_GRADIENT, Method, method
from tezo.methods.bases import find_basis
from tezo.models.loading import LoadedModel
from tezo.newton.labels import rank_for
from tezo.optim.base_optimizer import BaseOptimizer
from tezo.optim.estimators.estimate import FEEDBACK
from tezo.optim.learning_rate import choose_lr
from tezo.optim.measured_scale import RISE, MeasuredScale, in_words, measure_reach, measure_scale
from tezo.optim.optimizer import PER_EXAMPLE, SHARED
from tezo.optim.settings import DEFAULT, GIVEN, RESOLVED, Setting, Settings
from tezo.system.errors import NonFiniteLossError, RequestError
from tezo.system.progress import DIRECTIONS, RATE, RHO, current
from tezo.system.progress import FEEDBACK as LOOKING
from tezo.system.values import coerce
from tezo.tasks.formats import LabelFormat, default_template
from tezo.tasks.row_files import DataConfig
from tezo.tasks.rows import Format
from tezo.tasks.scoring import REWARD
from tezo.training.rows_of_steps import KEYS, Rows, default_counts, is_feedback, planned
from tezo.training.settings import Config, MethodConfig, TrainConfig

O = TypeVar("O", bound=BaseOptimizer)  # noqa: E741

RESOLVED_AT_START: dict[str, Any] = {
    "model.dtype": "auto",
    "method.name": AUTO,
    "data.shape": "auto",
    "data.text": DataConfig.text,
    "data.template": None,
    "data.label_words": None,
    "method.rank": AUTO,
    "method.directions": AUTO,
    "method.lr": AUTO,
    "method.rho": AUTO,
    "train.batch_size": None,
    "train.steps": None,
    "train.schedule": None,
    "train.feedback_first": None,
    "train.feedback_last": None,
    "train.guard": None,
}
"""Settings that are filled in -> the value that leaves them open."""

EPOCHS, LEAST_STEPS, MOST_STEPS = 20, 200, 1000
"""Default number of steps: so many epochs, within these bounds."""
FEW_STEPS = 1
"""Default number of steps on few labelled rows whose outputs are kept. A second step sees errors of rows that the
first was fitted to. Chosen by trials that are not committed, on training rows that no run had: after a second step the
loss of SST-2 rose from 0.45 and 0.49 to 0.79 and 0.80 (16 rows of a label), that of examples/issues went from
0.64 and 0.51 to 0.60 and 0.53, that of TREC from 0.83 to 0.76."""
SEARCH_SHARE = 0.2
"""Forward passes of the search for a learning rate, with those of the measurement of rho, as a part of the steps'."""
DEFAULT_RHO = 1e-3
"""The paper's: the first scale that is tried where the model computes in float32."""
ROUNDED_RHO = 3e-3
"""The first where it rounds its losses: packed, or in half precision."""
ROUNDED_BITS = 64
"""Bound of the rounding error of a loss on a CPU, in units of the last place of its dtype."""
RANDOM = "gaussian"
"""The basis of random directions, which looks at nothing."""
REWARD_RHO = 1e-2
"""For a reward, where nothing is measured."""


@dataclass(frozen=True)
class Choice:
    """The value of a setting that a request leaves open.

    Attributes:
        key: of the setting, as in a configuration file.
        value: from now on.
        why: sentence for the user; empty where the value needs none.
    """

    key: str
    value: Any
    why: str = ""


class Choices:
    """The choices of one request, in the order in which they are made.

    Args:
        config: the request.

    Attributes:
        config: the request with the choices so far.
        made: the choices so far.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.made: list[Choice] = []

    def add(self, choices: Iterable[Choice]) -> None:
        """Takes in further choices."""
        for choice in choices:
            self.config = self.config.with_setting(choice.key, choice.value)
            self.made.append(choice)

    @property
    def notices(self) -> tuple[str, ...]:
        """The reasons that the user should know."""
        return tuple(choice.why for choice in self.made if choice.why)


@dataclass(frozen=True)
class Resolved(Generic[O]):
    """A configuration with no open setting, the optimizer that has it, and what the user should know of the choices."""

    config: Config
    optimizer: O
    notices: tuple[str, ...]


def resolve(
    choices: Choices, rows: Rows | None, build: Callable[[Config], O], *, measuring: bool = True
) -> Resolved[O]:
    """Makes the choices that are measured on the rows of steps, and builds the optimizer.

    Args:
        choices: so far; their configuration has a method and a number of steps.
        rows: what settings are measured on; None: there are none at hand, and defaults take the place of measurements.
        build: makes the optimizer of a configuration.
        measuring: whether forward passes may be made; without them what would be measured stays "auto".

    Raises:
        RequestError: what the request asks for cannot be had.
    """
    request = choices.config
    choices.add(choose_rank(request, rows.labels if rows else 0))
    choices.add(choose_directions(choices.config, rows, build, measuring=measuring))
    optimizer = build(choices.config)
    try:
        choices.add(choose_feedback(choices.config, optimizer, rows, measuring=measuring))
        choices.add(choose_guard(choices.config))
        measured = None
        if measuring or not is_rho_open(choices.config) or not choices.config.train.chooses_by_dev_rows:
            found, measured = choose_rho(choices.config, optimizer, rows)
            choices.add(found)
        choices.add(choose_rate(choices.config, optimizer, rows, measured, measuring=measuring))
    except BaseException:
        optimizer.close()  # a model that the caller has is free again
        raise
    config = choices.config
    if FEEDBACK in optimizer.rules and (config.train.feedback_first or config.train.feedback_last):
        optimizer.plan = partial(planned, settings=config.train, first=optimizer.rules[0])
    optimizer.settings = _settings(request, config, optimizer)
    return Resolved(config, optimizer, choices.notices)


def _settings(request: Config, resolved: Config, optimizer: BaseOptimizer) -> Settings:
    """Returns every option of an optimizer, with its source in the request."""
    asked, defaults = request.method.options, method(request.method.name).defaults()
    found = Settings()
    for name, setting in optimizer.settings.items():
        left_open = asked.get(name, defaults.get(name)) == AUTO
        source = RESOLVED if left_open else GIVEN if name in asked else DEFAULT
        found[name] = Setting(resolved.method.options.get(name, setting.value), source)
    for key in KEYS if FEEDBACK in optimizer.rules else ():
        found[key] = Setting(getattr(resolved.train, key), RESOLVED if getattr(request.train, key) is None else GIVEN)
    return found


def choose_dtype(config: Config, dtype: str) -> list[Choice]:
    """Returns the data type that the base was loaded in, so that it is loaded in it from now on."""
    return [Choice("model.dtype", dtype)] if config.model.dtype == "auto" else []


def choose_columns(form: Format) -> list[Choice]:
    """Returns the shape and labels of the rows, so that the settings mean the same on other rows.

    The default template stays open: it follows data.text, which other rows may have under another name.
    """
    if not isinstance(form, LabelFormat):
        return [] if form.shape == "task" else [Choice("data.shape", form.shape)]
    found = {"shape": "label", "text": form.text, "label_words": dict(form.words)}
    if form.template != default_template(form.kind, form.text):
        found["template"] = form.template
    return [Choice(f"data.{name}", value) for name, value in found.items()]


DEFAULTS = {
    GAUSS_NEWTON: f"these rows have {GAUSS_NEWTON}, whose steps are rounds over more rows",
    POLICY_GRADIENT: f"a reward has {POLICY_GRADIENT}, which learns from each token of an answer",
}


def choose_method(
    config: Config,
    loaded: LoadedModel,
    *,
    learns_outputs: bool,
    labelled: bool,
    why_no_answers: Callable[[], str | None] = lambda: None,
) -> list[Choice]:
    """Returns the method in the place of "auto", by what is tuned, on what and for what.

    1. A model that is not causal, or has an adapter of PEFT: head-feedback.
    2. A reward: policy-gradient; es in several processes, and of a model whose last blocks cannot be computed anew.
    3. A metric, or rows that neither share their labels nor are free text for the last layer: head-feedback.
    4. The loss, in several processes, which share rows by default: head-feedback.
    5. The loss of a model whose layers gauss-newton cannot look at: head-feedback.
    6. The loss otherwise: gauss-newton.

    (docs/experiments.md has the last on a model of 135M parameters and on small ones, docs/rewards.md the second.) No
    option of a method and no setting of the loop counts. What the method has of them is taken. Where the method cannot
    look at layers by its own basis, it has the basis gaussian, whose directions are random.

    Args:
        config: of the request.
        loaded: the model.
        learns_outputs: whether the rows share their labels, or are free text that the last layer can be fitted to.
        labelled: whether they have options.
        why_no_answers: returns why nothing can be learnt from the tokens of answers, as a clause; None: it can.

    Raises:
        RequestError: an option is set that this method does not have, or not with this value.
    """
    if config.method.name != AUTO:
        return []
    if config.train.objective == REWARD:
        name, why = _default_for_reward(config, loaded, why_no_answers)
    else:
        name, why = _default_method(config, loaded, learns_outputs=learns_outputs, labelled=labelled)
    check_options(config, name)
    found = [Choice("method.name", name, why or _on_rate(config, name))]
    unseen = loaded.unseen(_own_basis(name), labelled=labelled)
    if unseen is not None and "basis" not in config.method.options:
        found.append(
            Choice(
                "method.basis",
                RANDOM,
                f"method.basis is {RANDOM}, because {name} looks at inputs of layers by its own basis, for which torch "
                f"needs the weights, and {unseen}.",
            )
        )
    return found


def _own_basis(name: str) -> Basis:
    return find_basis(method(name).defaults().get("basis", RANDOM))


def _default_method(config: Config, loaded: LoadedModel, *, learns_outputs: bool, labelled: bool) -> tuple[str, str]:
    """Returns (the name of the default, why it is not the usual one of such rows; "" where it is)."""
    train, peft = config.train, config.model.peft
    usual = GAUSS_NEWTON if learns_outputs else HEAD_FEEDBACK
    if loaded.kind != "causal" or usual == HEAD_FEEDBACK:
        return HEAD_FEEDBACK, ""
    if peft != "none":
        return _instead(f"model.peft is {peft}, and the adapter is tuned", f"without one {DEFAULTS[usual]}")
    if not train.minimises_loss:
        return _instead(
            f"train.objective is {train.objective}, and {usual} needs the loss", f"for the loss {DEFAULTS[usual]}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        way = f"`--method {usual} --set train.parallel=directions` shares its directions"
        return _instead(f"{usual} does not share rows among processes", f"in one process {DEFAULTS[usual]}. {way}")
    if loaded.unseen(_own_basis(usual), labelled=labelled) is not None:
        return _instead(
            f"{usual} looks at inputs of layers, which cannot be seen here", f"where they can be, {DEFAULTS[usual]}"
        )
    return usual, ""


def _default_for_reward(
    config: Config, loaded: LoadedModel, why_no_answers: Callable[[], str | None]
) -> tuple[str, str]:
    """Returns the same of a reward."""
    peft, usual = config.model.peft, DEFAULTS[POLICY_GRADIENT]
    if loaded.kind != "causal":
        return HEAD_FEEDBACK, ""
    if peft != "none":
        return _instead(f"model.peft is {peft}, and the adapter is tuned", f"without one {usual}")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    reason = f"{POLICY_GRADIENT} runs in one process" if several else why_no_answers()
    return (POLICY_GRADIENT, "") if reason is None else (ES, f"method.name is {ES}, because {reason}; else {usual}.")


def _instead(reason: str, usual: str) -> tuple[str, str]:
    return HEAD_FEEDBACK, f"method.name is {HEAD_FEEDBACK}, because {reason}; {usual}."


def check_options(config: Config, name: str) -> None:
    """Raises a `RequestError` where options are set that the method `name`, which nobody asked for, does not take."""
    given, types_of = config.method.options, method(name).options()
    for key, value in given.items():
        of_key, of_all = (
            [other for other in METHODS if _takes(method(other).options(), options)]
            for options in ({key: value}, given)
        )
        if name not in of_key and of_key:
            fault = (
                f"method.{key} is auto, which {name}, the default here, does not choose"
                if key in types_of
                else f"method.{key}: {name}, the default here, has no such option"
            )
            has_it = of_all or of_key
            other = ES if name == POLICY_GRADIENT and ES in has_it else has_it[0]
            raise RequestError(f"{fault}; leave it out, or add --method {other} (method.name), which has it.")
        coerce(f"method.{key}", value, types_of[key])


def takes_auto(kind: Any) -> bool:
    """Returns whether an option of this type may be "auto"."""
    return AUTO in (kind, *get_args(kind)) or any(map(takes_auto, get_args(kind)))


def settled_options(given: MethodConfig) -> dict[str, Any]:
    """Returns the options of a method without those that are "auto", which a run chooses or has at their defaults.

    Of any other option that the method has "auto" is a value, which it refuses.
    """
    takes_others = {key for key, kind in method(given.name).options().items() if not takes_auto(kind)}
    return {key: value for key, value in given.options.items() if value != AUTO or key in takes_others}


def _takes(types_of: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return all(key in types_of and (value != AUTO or takes_auto(types_of[key])) for key, value in given.items())


def _on_rate(config: Config, name: str) -> str:
    """Returns a notice where a rate is set and the default has something else under that name; "" otherwise."""
    lr, meaning = config.method.options.get("lr"), method(name).rate
    if lr is None or not meaning:
        return ""
    return (
        f"method.lr is {lr:g}: for {name}, the default here, it is {meaning}. A learning rate is for another method, "
        f"such as --method {HEAD_FEEDBACK}."
    )


def choose_for_few(train: TrainConfig) -> list[Choice]:
    """Returns a number of steps, and that the run does not go back: no dev rows tell which of its states is best.

    The number of steps is for steps of all rows: where a request sets the rows of a step, the method's number stays.
    """
    is_open = train.steps is None and train.epochs is None and train.batch_size is None
    found = [Choice("train.steps", FEW_STEPS)] if is_open else []
    return [*found, Choice("train.guard", False)] if train.guard is None else found


def choose_size(train: TrainConfig, num_rows: int, chosen: Method[Any]) -> list[Choice]:
    """Returns a batch size, a schedule and a number of steps: those given, or the method's.

    The steps of a method without a number are `EPOCHS` within bounds. A batch has no row twice.

    Args:
        train: of the request.
        num_rows: number of rows that steps are taken on.
        chosen: the method.

    Raises:
        RequestError: train.epochs and train.steps differ, or the epochs are too many.
    """
    size = min(train.batch_size or chosen.batch_size, num_rows)
    why = ""
    if train.batch_size not in (None, size):
        why = (
            f"train.batch_size is {size}, the number of rows that steps are taken on, and not {train.batch_size}: a "
            "step has no row twice."
        )
    if train.epochs is not None:
        steps = math.ceil(train.epochs * num_rows / size)
        if steps >= 2**31:
            raise RequestError(f"train.epochs is {train.epochs:g}, which are {steps:.1e} steps; lower it.")
        if train.steps not in (None, steps):
            raise RequestError(
                f"train.steps is {train.steps}, and train.epochs {train.epochs:g} are {steps} steps; leave one out."
            )
    else:
        of_rows = min(MOST_STEPS, max(LEAST_STEPS, math.ceil(EPOCHS * num_rows / size)))
        steps = train.steps or chosen.steps or of_rows
    return [
        Choice("train.batch_size", size, why),
        Choice("train.schedule", train.schedule or chosen.schedule),
        Choice("train.steps", steps),
    ]


def choose_rank(config: Config, labels: int) -> list[Choice]:
    """Returns the rank of a method that goes by the number of labels that rows share; 0: they share none."""
    is_open = config.method.options.get("rank", AUTO) == AUTO and "rank" in method(config.method.name).chosen
    return [Choice("method.rank", rank_for(labels))] if is_open else []


def choose_directions(
    config: Config, rows: Rows | None, build: Callable[[Config], BaseOptimizer], *, measuring: bool
) -> list[Choice]:
    """Returns directions in the place of "auto".

    Directions are per-example where the objective is the loss, processes share rows, and a step on a copy of the
    settings (rank 1, learning rate 0, four passes) finds that each row is measured alone; otherwise shared. Without
    measuring each row is assumed to be.
    """
    chosen = method(config.method.name)
    asked = config.method.options.get("directions", chosen.defaults().get("directions"))
    if asked != AUTO:
        return [Choice("method.directions", asked)] if asked == PER_EXAMPLE else []
    apart = config.train.minimises_loss and config.train.parallel != "directions"
    if not apart or rows is None or rows.share_directions:
        return [Choice("method.directions", SHARED)]
    found, trial = config.with_options(directions=PER_EXAMPLE), None
    cheap = {"rank": 1, "basis": RANDOM, "lr": 0.0}
    try:
        trial = build(found.with_options(**{key: value for key, value in cheap.items() if key in chosen.options()}))
        trial.unperturbed_loss = math.inf  # the steps of the run say what this one would
        if measuring:
            with current().phase(DIRECTIONS):
                trial.step(rows.few())
    except NonFiniteLossError:
        pass  # the first step of the run says so
    except RequestError as error:
        return [Choice("method.directions", SHARED, f"directions are shared by the rows of a batch: {error}")]
    finally:
        if trial is not None:
            trial.close()
    return [Choice("method.directions", PER_EXAMPLE)]


def choose_feedback(config: Config, optimizer: BaseOptimizer, rows: Rows | None, *, measuring: bool) -> list[Choice]:
    """Returns the numbers of feedback steps that the request leaves open.

    They are `default_counts` if the method takes feedback steps, the objective is the loss and a pass shows that the
    model supports them, which is assumed without measuring; otherwise 0.

    Raises:
        RequestError: feedback steps are set, but the method, the objective or the model does not support them.
    """
    train, name = config.train, config.method.name
    asked = [f"train.{key} is {count}" for key in KEYS if (count := getattr(train, key))]
    available = FEEDBACK in optimizer.rules
    if asked and not available:
        raise RequestError(
            f"{asked[0]}, and {name} takes no feedback steps; set it to 0, or add --method {HEAD_FEEDBACK}."
        )
    if asked and not train.minimises_loss:
        raise RequestError(f"{asked[0]}, and train.objective {train.objective} has no gradient; leave one of them out.")
    engine = None if rows is None else rows.engine
    if asked and engine is not None:
        raise RequestError(f"{asked[0]}, and {engine} computes no gradient; set it to 0, or leave model.engine out.")
    possible = available and train.minimises_loss and rows is not None
    defaults, why = default_counts(train.num_steps) if possible else (0, 0), ""
    wanted = any(default for key, default in zip(KEYS, defaults, strict=True) if getattr(train, key) is None)
    if wanted and engine is not None:
        defaults, why = (0, 0), f"there are no feedback steps: {engine} computes no gradient."
    elif measuring and rows is not None and (asked or wanted):
        try:
            with current().phase(LOOKING):
                optimizer.check_rule(FEEDBACK, rows.step(0, per_example=False))
        except RequestError as reason:
            if asked:
                raise
            defaults, why = (0, 0), f"there are no feedback steps: {reason}"
    counts = {key: default for key, default in zip(KEYS, defaults, strict=True) if getattr(train, key) is None}
    if sum(counts.get(key, getattr(train, key)) for key in KEYS) > train.num_steps:
        raise RequestError(
            f"{' and '.join(asked)}, more than the {train.num_steps} steps; lower them, or raise the steps."
        )
    first = next(iter(counts), None)  # the reason is the same for both, and said once
    return [Choice(f"train.{key}", count, why if key == first else "") for key, count in counts.items()]


def choose_guard(config: Config) -> list[Choice]:
    """Returns whether the run may go back to its best state: as is the method's default."""
    return [Choice("train.guard", method(config.method.name).guarded)] if config.train.guard is None else []


def is_rho_open(config: Config) -> bool:
    """Whether the configuration leaves rho open, and the method has one.

    Raises:
        RequestError: rho is auto by request, and the objective is a metric that is no reward.
    """
    wanted = config.method.options.get("rho")
    if wanted == AUTO and not config.train.chooses_by_dev_rows:
        raise RequestError(
            f"method.rho is auto, which needs train.objective loss, not {config.train.objective}; set a number."
        )
    return (wanted or method(config.method.name).defaults().get("rho")) == AUTO


def first_scale(model: Any) -> float:
    """The scale that is tried first on a model."""
    rounds = any(is_packed(p) or p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return ROUNDED_RHO if rounds else DEFAULT_RHO


def known_rounding(model: Any) -> float | None:
    """Bound of the rounding error of a loss, as a part of it; None where it has to be measured."""
    kinds = {p.dtype for p in model.parameters()}
    exact = {torch.float32, torch.float64}
    if not kinds <= exact or any(is_packed(p) or p.device.type != "cpu" for p in model.parameters()):
        return None
    return ROUNDED_BITS * max(torch.finfo(kind).eps for kind in kinds)


def choose_rho(
    config: Config, optimizer: BaseOptimizer, rows: Rows | None
) -> tuple[list[Choice], MeasuredScale | None]:
    """Returns (rho in the place of "auto", what was measured). The optimizer has it.

    It is measured along the directions that the run draws, of a loss and of a reward; see `tezo.optim.measured_scale`.
    For another metric, and where there are no rows, it is a number.
    """
    if not is_rho_open(config):
        return [], None
    if not config.train.minimises_loss or rows is None:
        choice = Choice("method.rho", first_scale(optimizer.model))
        if config.train.objective == REWARD:
            choice = _rho_of_answers(optimizer, rows)
        optimizer.set_rho(choice.value)
        return [choice], None
    losses, rounding = rows.losses(0, per_example=optimizer.per_example), known_rounding(optimizer.model)
    with current().phase(RHO):
        found = measure_scale(optimizer, losses, first_scale(optimizer.model), current().report, rounding=rounding)
    optimizer.set_rho(found.chosen.rho)
    dtype = next(p.dtype for p in optimizer.model.parameters() if p.is_floating_point())
    return [Choice("method.rho", found.chosen.rho, in_words(found, str(dtype).removeprefix("torch.")))], found


def _rho_of_answers(optimizer: BaseOptimizer, rows: Rows | None) -> Choice:
    """Returns rho for a reward; `REWARD_RHO` where nothing can be measured."""
    if rows is None:
        return Choice("method.rho", REWARD_RHO)
    with current().phase(RHO):
        loss = rows.answers_of_model()
        if loss is None:
            return Choice("method.rho", REWARD_RHO)
        rho, rise = measure_reach(optimizer, loss)
    why = (
        f"method.rho is {rho:.1e}: the scale at which answers of the untuned model become less likely by about "
        f"{RISE:g} nats a token ({rise:.2g} were measured there)."
    )
    return Choice("method.rho", rho, why)


def choose_rate(
    config: Config, optimizer: BaseOptimizer, rows: Rows | None, measured: MeasuredScale | None, *, measuring: bool
) -> list[Choice]:
    """Returns the learning rate, which the optimizer has; "auto" where it is to be searched for and is not yet."""
    wanted = config.method.options.get("lr", method(config.method.name).defaults()["lr"])
    default = float(optimizer.param_groups[0]["lr"])
    if wanted != AUTO:
        return [Choice("method.lr", default)]
    reason = None
    if not config.train.minimises_loss:
        reason = f"a rate for train.objective {config.train.objective} cannot be told from a few steps"
    elif rows is None or rows.held_out == 0:
        reason = "there are no rows to compare rates on"
    if reason is not None or rows is None:
        if "lr" in config.method.options:
            raise RequestError(f"method.lr is auto, and {reason}; set a number.")
        return [Choice("method.lr", default, f"method.lr is {default:.1e}, the method's default: {reason}.")]
    if not measuring:
        return [Choice("method.lr", AUTO)]
    passes = math.ceil(rows.held_out / config.train.rows_per_step)
    spent = 0 if measured is None else measured.num_forward_passes
    budget = search_budget(config.train, optimizer) - spent
    batch = partial(rows.step, per_example=optimizer.per_example)
    with current().phase(RATE):
        found = choose_lr(
            optimizer, batch, rows.held_out_losses, passes, config.train.num_steps, budget, measured, current().report
        )
    return [Choice("method.lr", found.lr, found.notice)]


def search_budget(train: TrainConfig, optimizer: BaseOptimizer) -> int:
    """Forward passes that the search for a learning rate may take, together with the measurement of rho."""
    feedback = sum(is_feedback(step, train) for step in range(train.num_steps))
    others = optimizer.passes_of(optimizer.rules[0], first=False) * (train.num_steps - feedback)
    return int(SEARCH_SHARE * (others + (optimizer.passes_of(FEEDBACK, first=False) * feedback if feedback else 0)))
