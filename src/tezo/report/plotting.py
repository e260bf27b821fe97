"""How every figure looks, in analyses and in reports: one matplotlib style, and SVG whose text stays text."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tezo.errors import RequestError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's, which colour-blind people tell apart; the order keeps neighbours apart in grey too."""
COLOUR_MAP = "cividis"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "image.cmap": COLOUR_MAP,
    "svg.fonttype": "none",
    "svg.hashsalt": "tezo",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
}


@contextmanager
def figure_style(command: str, settings: Mapping[str, Any] | None = None) -> Iterator[type[Any]]:
    """The style of this library, in which figures are made, laid out and saved.

    Args:
        command: that draws, for the error.
        settings: of matplotlib, laid over the style.

    Yields:
        matplotlib's `Figure`.

    Raises:
        RequestError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(f"{command} draws with matplotlib ({error}); pip install matplotlib.") from None
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=COLOURS), **(settings or {})}):
        yield Figure
