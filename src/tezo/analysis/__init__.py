"""The paper's figures and proofs, drawn from the reader's own model: a row of `ANALYSES` each."""

from tezo.analysis.base import Analysis as Analysis
from tezo.analysis.base import Given as Given
from tezo.analysis.base import drawn as drawn
from tezo.analysis.base import save as save
from tezo.analysis.convergence import CONVERGENCE
from tezo.analysis.costs import MEMORY, STEP_TIME
from tezo.analysis.estimator import ESTIMATOR
from tezo.analysis.gradient_spectrum import SPECTRUM
from tezo.analysis.gradient_subspace import SUBSPACE
from tezo.analysis.half_precision import HALF_PRECISION
from tezo.analysis.loss import LOSS_CURVES
from tezo.analysis.second_moment import SECOND_MOMENT
from tezo.analysis.weight_rank import WEIGHT_RANK
from tezo.errors import RequestError, nearest

_ROWS = (
    SPECTRUM, SUBSPACE, WEIGHT_RANK, SECOND_MOMENT, ESTIMATOR, CONVERGENCE, HALF_PRECISION, MEMORY, STEP_TIME,
    LOSS_CURVES,
)  # fmt: skip
ANALYSES: dict[str, Analysis] = {entry.name: entry for entry in _ROWS}


def analysis(name: str) -> Analysis:
    """The analysis of that name; an error with the nearest one where there is none."""
    if name not in ANALYSES:
        raise RequestError(f"there is no analysis {name!r}. " + nearest(name, ANALYSES))
    return ANALYSES[name]
