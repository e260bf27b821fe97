"""What the fixed factors of low-rank directions are drawn from, one file each."""

from collections.abc import Callable
from functools import partial

from tezo.directions.bases.activation import ActivationBasis as ActivationBasis
from tezo.directions.bases.basis import Basis as Basis
from tezo.directions.bases.basis import CollectedFactors as CollectedFactors
from tezo.directions.bases.basis import Draw as Draw
from tezo.directions.bases.basis import FactorStore as FactorStore
from tezo.directions.bases.basis import Passes as Passes
from tezo.directions.bases.basis import Role as Role
from tezo.directions.bases.gaussian import GaussianBasis as GaussianBasis
from tezo.errors import RequestError, nearest

BASES: dict[str, Callable[[], Basis]] = {
    "gaussian": GaussianBasis,
    "activation": ActivationBasis,
    "activation-centred": partial(ActivationBasis, centred=True),
    "activation-weighted": partial(ActivationBasis, weighted=True),
    "activation-orthonormal": partial(ActivationBasis, orthonormal=True),
}
"""By the names that recipes have for them. A name gives a new basis at each use, since one may hold what it saw."""


def find_basis(basis: str | Basis) -> Basis:
    """The basis of that name, or the one that is given; an error with the nearest where there is none."""
    if isinstance(basis, Basis):
        return basis
    if basis not in BASES:
        raise RequestError(f"method.basis: there is no basis {basis!r}. " + nearest(basis, BASES))
    return BASES[basis]()
