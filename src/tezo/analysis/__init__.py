"""The paper's figures and proofs, drawn from the reader's own model: a row of `ANALYSES` each."""

from tezo.analysis.base import Analysis as Analysis
from tezo.analysis.base import Given as Given
from tezo.analysis.base import drawn as drawn
from tezo.analysis.base import save as save
from tezo.analysis.convergence import CONVERGENCE
from tezo.analysis.estimator import ESTIMATOR
from tezo.analysis.second_moment import SECOND_MOMENT
from tezo.errors import RequestError, nearest

ANALYSES: dict[str, Analysis] = {entry.name: entry for entry in (SECOND_MOMENT, ESTIMATOR, CONVERGENCE)}


def analysis(name: str) -> Analysis:
    """The analysis of that name; an error with the nearest one where there is none."""
    if name not in ANALYSES:
        raise RequestError(f"there is no analysis {name!r}. " + nearest(name, ANALYSES))
    return ANALYSES[name]
