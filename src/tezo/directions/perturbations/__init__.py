"""Perturbations: the rules by which the methods draw their directions, one file each."""

from tezo.directions.perturbations.dense_noise import DenseGaussian as DenseGaussian
from tezo.directions.perturbations.lazy_factor import Lazy as Lazy
from tezo.directions.perturbations.momentum_noise import Annealing as Annealing
from tezo.directions.perturbations.momentum_noise import SimulatedMomentum as SimulatedMomentum
from tezo.directions.perturbations.orthonormal_core import Subspace as Subspace
from tezo.directions.perturbations.perturbation import DrawKey as DrawKey
from tezo.directions.perturbations.perturbation import LowRankPerturbation as LowRankPerturbation
from tezo.directions.perturbations.perturbation import Perturbation as Perturbation
from tezo.directions.perturbations.perturbation import Scale as Scale
from tezo.directions.perturbations.sparse_noise import SmallEntries as SmallEntries
from tezo.directions.perturbations.temporal_factor import Temporal as Temporal
