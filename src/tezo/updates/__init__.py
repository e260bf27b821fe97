"""How to step along an estimate, one file each."""

from tezo.updates.adam import Adam as Adam
from tezo.updates.adam import FactoredAdam as FactoredAdam
from tezo.updates.adamu import AdaMU as AdaMU
from tezo.updates.base import State as State
from tezo.updates.base import Update as Update
from tezo.updates.clipped import Clipped as Clipped
from tezo.updates.momentum import Momentum as Momentum
from tezo.updates.normalized import NormalizedSGD as NormalizedSGD
from tezo.updates.sgd import SGD as SGD
