"""tezo: fine-tuning with forward passes, and at most the gradient of the output head.

`tezo.train` tunes a model on rows and returns a `Run`; `tezo.open_run` opens one that has ended. The methods are
optimizers too, for your loops. Parts that need torch are imported at first use, so that `import tezo` is
quick.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tezo.system.errors import NonFiniteLossError as NonFiniteLossError
from tezo.system.errors import RequestError as RequestError
from tezo.system.errors import RunError as RunError
from tezo.system.errors import RunInterrupted as RunInterrupted
from tezo.system.errors import TezoError as TezoError

if TYPE_CHECKING:
    from tezo.methods import METHODS as METHODS
    from tezo.methods import Method as Method
    from tezo.methods import adam as adam
    from tezo.methods import add_method as add_method
    from tezo.methods import es as es
    from tezo.methods import fzoo as fzoo
    from tezo.methods import gauss_newton as gauss_newton
    from tezo.methods import head_feedback as head_feedback
    from tezo.methods import lozo as lozo
    from tezo.methods import lozo_m as lozo_m
    from tezo.methods import mezo as mezo
    from tezo.methods import mezo_adam as mezo_adam
    from tezo.methods import mezo_m as mezo_m
    from tezo.methods import policy_gradient as policy_gradient
    from tezo.methods import probe as probe
    from tezo.methods import subzo as subzo
    from tezo.methods import tezo as tezo
    from tezo.methods import tezo_adam as tezo_adam
    from tezo.methods import tezo_cadam as tezo_cadam
    from tezo.methods import tezo_m as tezo_m
    from tezo.methods import zo_adamu as zo_adamu
    from tezo.models.saving import export_adapter as export_adapter
    from tezo.optim.first_order import FirstOrderOptimizer as FirstOrderOptimizer
    from tezo.optim.optimizer import ZerothOrderOptimizer as ZerothOrderOptimizer
    from tezo.tasks.objectives.labelled_tensors import closure as closure
    from tezo.trainer.sft import TezoSFTTrainer as TezoSFTTrainer
    from tezo.trainer.trainer import TezoTrainer as TezoTrainer
    from tezo.training.api import Run as Run
    from tezo.training.api import load_adapter as load_adapter
    from tezo.training.api import open_run as open_run
    from tezo.training.api import prepare as prepare
    from tezo.training.api import train as train
    from tezo.training.run import lm_eval as lm_eval

__version__ = version("tezo")

_METHODS = (
    "adam", "es", "fzoo", "gauss_newton", "lozo", "head_feedback", "lozo_m", "mezo",
    "mezo_adam", "mezo_m", "policy_gradient", "probe", "subzo", "tezo", "tezo_adam",
    "tezo_cadam", "tezo_m", "zo_adamu",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(("Run", "load_adapter", "open_run", "prepare", "train"), "tezo.training.api"),
    **dict.fromkeys(("METHODS", "Method", "add_method", *_METHODS), "tezo.methods"),
    "TezoSFTTrainer": "tezo.trainer.sft",
    "TezoTrainer": "tezo.trainer.trainer",
    "FirstOrderOptimizer": "tezo.optim.first_order",
    "ZerothOrderOptimizer": "tezo.optim.optimizer",
    "closure": "tezo.tasks.objectives.labelled_tensors",
    "export_adapter": "tezo.models.saving",
    "lm_eval": "tezo.training.run",
}
"""Name -> the module that has it; tests compare it with what is imported above for type checkers."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tezo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
