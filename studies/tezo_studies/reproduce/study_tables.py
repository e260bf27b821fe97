"""A study of our own: how many forward passes a loss takes, with directions drawn blindly and drawn from the data."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tezo.methods import METHODS
from tezo.optim.estimators.feedback import PASSES
from tezo.optim.optimizer import PER_EXAMPLE, SHARED
from tezo.training.rows_of_steps import FIRST, LAST, default_counts
from tezo_studies.reproduce.table import Column, CompletionsColumn, Line, Table

STEPS, EVERY = 240, 24
"""Of each line, and between the evaluations that its curve is read off."""

PLAIN_RATES = (1e-5, 3e-5, 1e-4)
ADAPTIVE_RATES = (1e-4, 3e-4, 1e-3)
# A basis that holds more of the gradient, and of the curvature with it, asks for smaller steps.
PLAIN_BASIS_RATES = (3e-6, 1e-5, 3e-5)
FACTOR_BASIS_RATES = (1e-6, 3e-6, 1e-5)
BASIS_RATES = (3e-5, 1e-4, 3e-4)

# Falling to zero, of the same means over a run.
LINEAR_RATES = (6e-5, 2e-4, 6e-4)

_TEZO = {"rank": 32}
_ACT = {"basis": "activation"}
_FACTOR = {"rank": 8, "basis": "activation"}


def _line(
    label: str, method: str, rates: tuple[float, ...], options: dict[str, Any], *settings: tuple[str, Any]
) -> Line:
    # runs of these would choose for themselves
    open_ones = {"directions": SHARED} if "directions" in METHODS[method].chosen else {}
    return Line(label, "train", method, rates, rates[1], {**open_ones, **options}, settings=settings)


def _factor(
    label: str, options: Mapping[str, Any], *settings: tuple[str, Any], rates: tuple[float, ...] = BASIS_RATES
) -> Line:
    return _line(f"LOZO-Adam{label}", "head-feedback", rates, {**_FACTOR, **options}, *settings)


_DIRECTIONS = 4


def _feedback(
    label: str,
    budget: int,
    first: int,
    last: int,
    options: Mapping[str, Any] | None = None,
    rates: tuple[float, ...] = BASIS_RATES,
) -> Line:
    """A line whose first and last steps are along the error at the last hidden states, within as many forward passes.

    Each of those takes one pass, and each stretch of them two more.
    """
    passes = sum(count + PASSES for count in (first, last) if count)
    steps = first + last + (budget - passes) // 2
    places = (("train.feedback_first", first), ("train.feedback_last", last))
    return _factor(f" + act, {label}", options or {}, ("train.steps", steps), *places, rates=rates)


_EACH = {"directions": PER_EXAMPLE}


STUDY = Table(
    name="study",
    title="Directions drawn blindly and from the data, on a small encoder (22M parameters), 480 forward passes",
    model="embedded:all-minilm-l6-v2",
    kind="encoder",
    columns=tuple(Column(task, count) for task, count in (
        ("sst2", 16), ("trec", 16), ("sst2", 512), ("trec", 512), ("sst5", 16), ("snli", 16), ("rte", 16),
    )),
    lines=(
        Line("ZERO-SHOT", "zero-shot"),
        Line("PROBE", "probe"),
        Line("FT", "train", "adam", PLAIN_RATES, PLAIN_RATES[1]),
        _line("MeZO", "mezo", PLAIN_RATES, {}),
        _line("MeZO-norm", "mezo-norm", ADAPTIVE_RATES, {}),
        _line("LOZO", "lozo", PLAIN_RATES, {"rank": 8, "lazy_update_interval": 100}),
        _line("SubZO", "subzo", PLAIN_RATES, {"rank": 64, "lazy_update_interval": 600}),
        _line("TeZO", "tezo", PLAIN_RATES, _TEZO),
        _line("TeZO-Adam", "tezo-adam", ADAPTIVE_RATES, _TEZO),
        _line("TeZO-cAdam", "tezo-cadam", ADAPTIVE_RATES, _TEZO),
        _line("TeZO + act", "tezo", PLAIN_BASIS_RATES, _TEZO | _ACT),
        _line("cAdam + act", "tezo-cadam", BASIS_RATES, _TEZO | _ACT),
        _line("cAdam + act, refresh 60", "tezo-cadam", BASIS_RATES, _TEZO | _ACT | {"lazy_update_interval": 60}),
        _line("LOZO + act", "lozo", FACTOR_BASIS_RATES, _FACTOR | {"lazy_update_interval": None}),
        _line("LOZO-Adam gauss", "head-feedback", ADAPTIVE_RATES, _FACTOR | {"basis": "gaussian"}),
        _factor(" + act", {}),
        _factor(" + act, rank 4", {"rank": 4}),
        _factor(" + act, rank 16", {"rank": 16}),
        _factor(" + act, refresh 60", {"lazy_update_interval": 60}),
        _factor(" + act, 4 directions", {"num_directions": _DIRECTIONS},
                ("train.steps", STEPS // _DIRECTIONS), ("train.eval_every", EVERY // _DIRECTIONS)),
        _line("LOZO-Adam + act, linear", "head-feedback", LINEAR_RATES, _FACTOR, ("train.schedule", "linear")),
        _feedback("feedback", 2 * STEPS, FIRST, LAST),
        _feedback("feedback first", 2 * STEPS, FIRST, 0),
        _feedback("feedback last", 2 * STEPS, 0, LAST),
        _feedback("feedback alone", 2 * STEPS, 2 * STEPS - PASSES, 0),
        _line("TeZO, per example", "tezo", PLAIN_RATES, _TEZO | _EACH),
        _line("cAdam + act, per example", "tezo-cadam", BASIS_RATES, _TEZO | _ACT | _EACH),
        _factor(" + act, per example", _EACH),
        _feedback("feedback, per example", 2 * STEPS, FIRST, LAST, _EACH),
    ),
    seeds=(13, 21, 42),
    search_seeds=3,
    steps=STEPS,
    batch_size=16,
    targets=("all-linear",),
    ft_epochs=10,
    ft_most_steps=STEPS,
    settings=(
        ("data.num_test", 400), ("data.num_dev", 100), ("train.eval_every", EVERY), ("train.keep_best", False),
        ("train.feedback_first", 0), ("train.feedback_last", 0),
    ),
    notes=(
        "Rows are samples of the data sets and the model is no language model: nothing here compares with a published "
        "number. Where there are fewer rows than 512 a class beside the 100 dev rows, all others train. FT has ten "
        f"epochs, and no more than {STEPS} steps.",
        "act: the leading directions of each layer's inputs; gauss: drawn blindly. 4 directions are as many forward "
        f"passes in a quarter of the steps. feedback: the first {FIRST} and the last {LAST} steps are along the error "
        "at the last hidden states. Every method tunes the linear layers.",
    ),
)  # fmt: skip

_LONGER = 4
_TO_THE_END = (
    "zero-shot", "ft", "mezo", "tezo", "tezo-adam",
    "lozo-act", "lozo-adam-act", "lozo-adam-act-linear",
)  # fmt: skip
_LONG_LINES = (
    *(line for line in STUDY.lines if line.key in _TO_THE_END),
    _factor(f" + act, refresh {STEPS}", {"lazy_update_interval": STEPS}),
    _feedback("feedback", 2 * _LONGER * STEPS, FIRST, LAST),
)

STUDY_LONG = replace(
    STUDY,
    name="study-long",
    title=f"The same to a later end, {2 * _LONGER * STEPS} forward passes",
    columns=tuple(column for column in STUDY.columns if column.key in ("trec-16", "sst2-16")),
    # without the largest rates: steps that are too large early on are so later
    lines=tuple(replace(line, rates=line.rates[:2]) for line in _LONG_LINES),
    steps=_LONGER * STEPS,
    settings=(*STUDY.settings, ("train.eval_every", _LONGER * EVERY)),
    notes=(
        *STUDY.notes[:1],
        "act: the leading directions of each layer's inputs. feedback: the first "
        f"{FIRST} and the last {LAST} steps are along the error at the last hidden states. Every method tunes the "
        "linear layers.",
    ),
)

_DECODER_STEPS, _DECODER_EVERY = 200, 25
_DECODER_FEEDBACK = default_counts(_DECODER_STEPS)


def _both(
    label: str, method: str, rates: tuple[float, ...], options: dict[str, Any], *settings: tuple[str, Any]
) -> tuple[Line, Line]:
    """A line with shared directions, and one with a direction for each example."""
    return (
        _line(label, method, rates, options, *settings),
        _line(f"{label}, per example", method, rates, options | _EACH, *settings),
    )


STUDY_DECODER = replace(
    STUDY,
    name="study-decoder",
    title="Directions shared by a batch and of each example, on a small decoder (260K parameters), "
    f"{2 * _DECODER_STEPS} forward passes",
    model="stories260K",
    kind="causal",
    columns=(CompletionsColumn("completions", batch_size=16), CompletionsColumn("completions", batch_size=64)),
    lines=(
        Line("ZERO-SHOT", "zero-shot"),
        Line("FT", "train", "adam", (3e-4, 1e-3, 3e-3), 1e-3),
        *_both("TeZO", "tezo", (3e-5, 1e-4, 3e-4), _TEZO),
        *_both("TeZO, linear", "tezo", LINEAR_RATES, _TEZO, ("train.schedule", "linear")),
        *_both("TeZO-cAdam", "tezo-cadam", ADAPTIVE_RATES, _TEZO),
        *_both("cAdam + act", "tezo-cadam", ADAPTIVE_RATES, _TEZO | _ACT),
        *_both("LOZO-Adam + act", "head-feedback", ADAPTIVE_RATES, _FACTOR),
        _feedback("feedback, per example", 2 * _DECODER_STEPS, *_DECODER_FEEDBACK, _EACH, ADAPTIVE_RATES),
    ),
    seeds=(0, 1, 2),
    search_seeds=1,
    steps=_DECODER_STEPS,
    ft_most_steps=_DECODER_STEPS // 2,
    settings=(
        ("train.eval_every", _DECODER_EVERY), ("train.keep_best", False),
        ("train.feedback_first", 0), ("train.feedback_last", 0),
    ),
    notes=(
        "Rows of prompt and completion, 270 to train on, 64 dev, 200 test; a cell is the percentage of tokens that are "
        f"the most likely ones. FT has {_DECODER_STEPS // 2} steps of 8 rows. The model is a toy: nothing here says "
        "what happens at another size.",
        "act: the leading directions of each layer's inputs. per example: each row of a batch has its own direction. "
        "linear: the learning rate falls to zero. "
        f"feedback: the first {_DECODER_FEEDBACK[0]} and the last {_DECODER_FEEDBACK[1]} steps are along the error at "
        "the last hidden states. Every method tunes the linear layers.",
    ),
)  # fmt: skip
