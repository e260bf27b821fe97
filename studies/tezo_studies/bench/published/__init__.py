"""The published algorithms as their authors wrote them: three passes that move the weights along Z, then an update.

Every pass resets the seed and draws again, builds Z of each parameter in full, in the parameter's dtype, and
writes a new tensor. Nothing of the engine is used but ZO-AdaMU's schedule. Expressions, their order and so their
traffic are those of the public code (MeZO, LOZO, SubZero), or of Algorithm 1 where there is none (TeZO). What is
particular:

- weight decay is 0 but computed on matrices, as MeZO and LOZO do;
- LOZO draws V within the perturbation of a refresh and not in its update, which therefore sees another U;
- LOZO-m begins at M = kappa U, where ours begins at zero;
- moments are dense and in the parameter's dtype (MeZO-m, MeZO-Adam), as the paper's memory figures have them;
- ZO-AdaMU is its paper's, since its public code cannot take a step.
"""

from tezo_studies.bench.published.algorithm import Draws as Draws
from tezo_studies.bench.published.algorithm import Published as Published
from tezo_studies.bench.published.algorithm import TorchDraws as TorchDraws
from tezo_studies.bench.published.dense_forms import MeZOAdam, MeZOm, ZOAdaMU
from tezo_studies.bench.published.lazy_forms import LOZO, LOZOm, SubZO
from tezo_studies.bench.published.temporal_forms import TeZO, TeZOAdam, TeZOm

PUBLISHED: dict[str, type[Published]] = {
    "mezo": Published,
    "mezo-m": MeZOm,
    "mezo-adam": MeZOAdam,
    "lozo": LOZO,
    "lozo-m": LOZOm,
    "subzo": SubZO,
    "zo-adamu": ZOAdaMU,
    "tezo": TeZO,
    "tezo-m": TeZOm,
    "tezo-adam": TeZOAdam,
}
