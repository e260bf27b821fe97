"""Analyses that redraw the paper's figures from the user's own model; each is an entry of `ANALYSES`."""

from tezo.system.errors import RequestError, nearest
from tezo_studies.analysis.convergence_figure import CONVERGENCE
from tezo_studies.analysis.costs import MEMORY, STEP_TIME
from tezo_studies.analysis.estimator_variance import ESTIMATOR
from tezo_studies.analysis.figure import Analysis as Analysis
from tezo_studies.analysis.figure import Given as Given
from tezo_studies.analysis.figure import drawn as drawn
from tezo_studies.analysis.figure import save as save
from tezo_studies.analysis.gradient_spectrum import SPECTRUM
from tezo_studies.analysis.gradient_subspace import SUBSPACE
from tezo_studies.analysis.half_precision import HALF_PRECISION
from tezo_studies.analysis.loss_curves import LOSS_CURVES
from tezo_studies.analysis.second_moment import SECOND_MOMENT
from tezo_studies.analysis.weight_rank import WEIGHT_RANK

_ROWS = (
    SPECTRUM, SUBSPACE, WEIGHT_RANK, SECOND_MOMENT, ESTIMATOR, CONVERGENCE, HALF_PRECISION, MEMORY, STEP_TIME,
    LOSS_CURVES,
)  # fmt: skip
ANALYSES: dict[str, Analysis] = {entry.name: entry for entry in _ROWS}


def analysis(name: str) -> Analysis:
    """The analysis `name`; `RequestError` with the nearest name if there is none."""
    if name not in ANALYSES:
        raise RequestError(f"there is no analysis {name!r}. " + nearest(name, ANALYSES))
    return ANALYSES[name]
