"""The analyses that need no model, at sizes that take a moment."""

from tezo_studies.analysis import analysis

SMALL = {
    "second-moment": {"sizes": [8, 12], "rank": 3, "steps": 30, "draws": 300},
    "estimator": {"sizes": [5, 8], "ranks": [1, 3], "draws": 30, "fixed_draws": 3},
    "convergence": {"sizes": [4], "rank": 2, "horizons": [10, 20], "rates": [0.5, 1.0], "seeds": 2},
}


def options_of(name: str, **changes: object):
    return analysis(name).options(**(SMALL[name] | changes))
