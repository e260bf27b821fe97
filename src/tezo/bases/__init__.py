"""What the fixed factors of low-rank directions are drawn from, one file each."""

from collections.abc import Callable
from functools import partial

from tezo.bases.activation import Activation as Activation
from tezo.bases.base import Basis as Basis
from tezo.bases.base import Draw as Draw
from tezo.bases.base import FactorStore as FactorStore
from tezo.bases.base import Passes as Passes
from tezo.bases.base import Role as Role
from tezo.bases.base import Seen as Seen
from tezo.bases.gaussian import Gaussian as Gaussian
from tezo.errors import RequestError, nearest

BASES: dict[str, Callable[[], Basis]] = {
    "gaussian": Gaussian,
    "activation": Activation,
    "activation-centred": partial(Activation, centred=True),
    "activation-weighted": partial(Activation, weighted=True),
    "activation-orthonormal": partial(Activation, orthonormal=True),
}
"""By the names that recipes have for them. A name gives a new basis at each use, since one may hold what it saw."""


def find_basis(basis: str | Basis) -> Basis:
    """The basis of that name, or the one that is given; an error with the nearest where there is none."""
    if isinstance(basis, Basis):
        return basis
    if basis not in BASES:
        raise RequestError(f"method.basis: there is no basis {basis!r}. " + nearest(basis, BASES))
    return BASES[basis]()
