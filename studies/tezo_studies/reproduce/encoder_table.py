"""A table that is not in the paper: all methods on a small pretrained encoder, in two hours on two cores."""

from typing import Any

from tezo_studies.reproduce.table import Column, Line, Table

# Spaced by a factor of about three around the best rate of a pilot on one seed (above 1e-4, plain steps diverge).
PLAIN_RATES = (1e-5, 3e-5, 1e-4)
ADAPTIVE_RATES = (3e-4, 1e-3, 3e-3)
FT_RATES = (1e-5, 3e-5, 1e-4)

_LOZO = {"rank": 8, "lazy_update_interval": 100}
_SUBZO = {"rank": 64, "lazy_update_interval": 500}
_TEZO = {"rank": 32}


def _line(label: str, rates: tuple[float, ...], options: dict[str, Any] | None = None) -> Line:
    return Line(label, "train", label.lower(), rates, rates[1], options or {})


ENCODER = Table(
    name="encoder",
    title="All methods on a small encoder (22M parameters), a subset of each task's rows",
    model="embedded:all-minilm-l6-v2",
    kind="encoder",
    columns=tuple(Column(task, 16) for task in ("sst2", "trec", "snli", "rte", "sst5"))
    + tuple(Column(task, 512) for task in ("sst2", "trec")),
    lines=(
        Line("ZERO-SHOT", "zero-shot"),
        Line("PROBE", "probe"),
        Line("FT", "train", "adam", FT_RATES, FT_RATES[1]),
        _line("MeZO", PLAIN_RATES),
        _line("MeZO-m", PLAIN_RATES),
        _line("MeZO-norm", ADAPTIVE_RATES),
        _line("MeZO-Adam", ADAPTIVE_RATES),
        _line("ZO-AdaMU", PLAIN_RATES),
        _line("LOZO", PLAIN_RATES, _LOZO),
        _line("LOZO-m", PLAIN_RATES, _LOZO),
        _line("SubZO", PLAIN_RATES, _SUBZO),
        _line("TeZO", PLAIN_RATES, _TEZO),
        _line("TeZO-m", PLAIN_RATES, _TEZO),
        _line("TeZO-Adam", ADAPTIVE_RATES, _TEZO),
        _line("TeZO-cAdam", ADAPTIVE_RATES, _TEZO),
    ),
    seeds=(13, 21, 42),
    search_seeds=1,
    steps=100,
    batch_size=16,
    targets=("all-linear",),
    ft_epochs=10,
    settings=(("data.num_test", 400),),
    notes=(
        "Rows are samples of the data sets and the model is not a language model, so no number here can be compared "
        "with a published one. If a class has fewer than 512 rows, they are divided into training and dev rows.",
        "An encoder compares the embedding of the text with that of a description of each label. Every method tunes "
        "the linear layers; TeZO has rank 32, LOZO rank 8 and a refresh every 100 steps, SubZO rank 64 and every 500, "
        "as in their papers.",
    ),
)
