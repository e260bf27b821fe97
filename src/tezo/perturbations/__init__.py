"""How each method draws its directions, one file each."""

from tezo.perturbations.base import LowRankPerturbation as LowRankPerturbation
from tezo.perturbations.base import Moment as Moment
from tezo.perturbations.base import Perturbation as Perturbation
from tezo.perturbations.base import Scale as Scale
from tezo.perturbations.gaussian import Gaussian as Gaussian
from tezo.perturbations.lazy import Lazy as Lazy
from tezo.perturbations.momentum import Annealing as Annealing
from tezo.perturbations.momentum import SimulatedMomentum as SimulatedMomentum
from tezo.perturbations.subspace import Subspace as Subspace
from tezo.perturbations.temporal import Temporal as Temporal
