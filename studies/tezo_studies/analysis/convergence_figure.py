"""How the analysis of Theorem 2 is drawn, printed and put in words."""

from typing import Any

from tezo_studies.analysis.convergence import ConvergenceOptions, measure_convergence
from tezo_studies.analysis.figure import COLOURS, Analysis, Numbers, Table


def draw_convergence(numbers: Numbers, figure: Any) -> None:
    """Draws the whole gradient against T (left), its part in the span of TeZO's factors, and the bound (right)."""
    figure.set_size_inches(12.0, 4.2)
    whole, part, bounded = figure.subplots(1, 3, sharey=True)
    horizons = numbers["horizons"]
    for i, row in enumerate(numbers["methods"]):
        look = {"color": COLOURS[i % len(COLOURS)], "marker": "os^Dv<>"[i % 7], "markersize": 4, "linewidth": 1.2}
        whole.plot(horizons, row["full"], label=f"{row['method']} ({_short(row['slope'])})", **look)
        if "span" in row:
            part.plot(horizons, row["span"], label=f"{row['method']} ({_short(row['span_slope'])})", **look)
    for axes, key in ((whole, "full"), (part, "span")):
        top = max(row[key][0] for row in numbers["methods"] if key in row)
        guide = [top * (horizons[0] / t) ** 0.5 for t in horizons]
        axes.plot(horizons, guide, "--", color="grey", linewidth=1, label="$1/\\sqrt{T}$ (-0.50)")
        axes.legend(fontsize=7, title="method (slope)", title_fontsize=7)
    _draw_bound(numbers["bound"], bounded)
    for axes in (whole, part, bounded):
        axes.set(xscale="log", yscale="log", xlabel="steps T")
        axes.set_xticks(horizons, [str(t) for t in horizons])
        axes.minorticks_off()
    whole.set_ylabel("mean |grad f($W_t$)|$^2$, over that at $W_0$")
    whole.set_title("whole gradient")
    part.set_title(f"in the span of the factors ({numbers['rank']} of {numbers['size'] ** 2} dimensions)")


LABELS = {"fresh": "tezo, factors drawn every step", "fixed": "tezo, factors drawn once"}
"""How tezo's factors are drawn, in words; the theorem is about the first."""


def _draw_bound(bound: Numbers, axes: Any) -> None:
    rows, first = bound["rows"], bound["first"]
    steps = [row["steps"] for row in rows]
    for key, label, dashes in (("printed", "bound as printed", ":"), ("bound", "bound, proof mended", "--")):
        axes.plot(steps, [row[key] / first for row in rows], dashes, color="black", linewidth=1.2, label=label)
    for (key, label), colour in zip(LABELS.items(), COLOURS, strict=False):
        values, errors = ([row[name] / first for row in rows] for name in (key, f"{key}_se"))
        axes.errorbar(steps, values, [2 * e for e in errors], color=colour, marker="o", markersize=4, label=label)
    axes.set_title("the bound, at the theorem's own rate")
    axes.legend(fontsize=7)


def tables_convergence(numbers: Numbers) -> list[Table]:
    """The constants of Theorem 2, and its bound beside what was measured."""
    bound = numbers["bound"]
    names = {"lipschitz": "lambda", "variance": "sigma^2", "gap": "D_0", "rho": "rho", "delta": "delta"}
    same = [[name, f"{bound[key]:.6g}", f"{bound[key]:.6g}"] for key, name in names.items()]
    moments = ["delta_rho", f"{bound['delta_rho']:.6g}", f"{bound['printed_delta_rho']:.6g}"]
    heads = ["steps T", "rate", "bound", "as printed", "drawn every step", "2 se", "drawn once", "2 se"]
    rows = [
        [str(row["steps"]), f"{row['rate']:.2e}", f"{row['bound']:.2f}", f"{row['printed']:.2f}"]
        + [text for key in LABELS for text in (f"{row[key]:.2f}", f"{2 * row[f'{key}_se']:.2f}")]
        for row in bound["rows"]
    ]
    return [[["constant", "value", "as printed"], *same, moments], [heads, *rows]]


def _short(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # no minus before a zero


def caption_convergence(numbers: Numbers) -> str:
    """The caption of the figure."""
    size, rows = numbers["size"], {row["method"]: row for row in numbers["methods"]}
    steps = ", ".join(map(str, numbers["horizons"]))
    return (
        f"Mean squared gradient norm of a smooth nonconvex f of a {size} x {size} matrix (sum of "
        f"(d^2 + 1 - cos 2d) / 2, lambda = {numbers['lipschitz']:g}, noisy gradients), rank {numbers['rank']}, a run "
        f"of T = {steps} steps each at a rate that falls as 1/sqrt(T). With fixed factors tezo can be stationary in "
        f"their span alone, {numbers['span_share']:.1%} of the space: over the last tenth of the longest run its "
        f"squared gradient is {rows['tezo']['last'][-1]:.2f} of the first in full and "
        f"{rows['tezo']['span_last'][-1]:.2g} within the span. {_bound_in_words(numbers)}"
    )


def _bound_in_words(numbers: Numbers) -> str:
    bound, last = numbers["bound"], numbers["bound"]["rows"][-1]
    return (
        f"Theorem 2 bounds the mean of |grad f|^2 over {last['steps']} steps at its own rate by {last['bound']:.1f} "
        f"({last['printed']:.1f} as printed; sigma^2 = {bound['variance']:g}, delta = {bound['delta']:.1f}, "
        f"delta_rho = {bound['delta_rho']:.3g}): it is {last['fresh']:.1f} with factors drawn afresh in every step, "
        f"which the theorem is about, and {last['fixed']:.1f} with factors drawn once (mean of {bound['seeds']} runs; "
        f"{bound['first']:.1f} at W_0)."
    )


CONVERGENCE = Analysis(
    name="convergence",
    paper="Theorem 2",
    needs="nothing",
    options=ConvergenceOptions,
    measure=measure_convergence,
    draw=draw_convergence,
    caption=caption_convergence,
    tables=tables_convergence,
)
