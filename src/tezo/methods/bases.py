"""The bases that methods can name: where the fixed factors of their directions come from."""

from collections.abc import Callable

from tezo.directions.bases.activation import ActivationBasis
from tezo.directions.bases.basis import Basis, GaussianBasis, OrthonormalBasis
from tezo.newton.look import ErrorBasis
from tezo.newton.probe import ProbeBasis
from tezo.system.errors import RequestError, nearest

BASES: dict[str, Callable[[], Basis]] = {
    "gaussian": GaussianBasis,
    "orthonormal": OrthonormalBasis,
    "activation": ActivationBasis,
    "errors": ErrorBasis,
    "probe": ProbeBasis,
}
"""Bases by their names in recipes. Each use of a name makes a new basis, since a basis may hold factors."""


def find_basis(basis: str | Basis) -> Basis:
    """Returns the basis of that name, or the given one.

    Raises:
        RequestError: there is no basis of that name; the error has the nearest one.
    """
    if isinstance(basis, Basis):
        return basis
    if basis not in BASES:
        raise RequestError(f"method.basis: there is no basis {basis!r}. " + nearest(basis, BASES))
    return BASES[basis]()
