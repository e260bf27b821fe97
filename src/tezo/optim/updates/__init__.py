"""Update rules, one file each."""

from tezo.optim.updates.adam import Adam as Adam
from tezo.optim.updates.adam import FactoredAdam as FactoredAdam
from tezo.optim.updates.adamu import AdaMU as AdaMU
from tezo.optim.updates.momentum import Momentum as Momentum
from tezo.optim.updates.normalized import NormalizedSGD as NormalizedSGD
from tezo.optim.updates.sgd import SGD as SGD
from tezo.optim.updates.sign import SignSGD as SignSGD
from tezo.optim.updates.update import State as State
from tezo.optim.updates.update import Update as Update
