"""tezo: fine-tuning by forward passes alone.

The methods, and what a script needs around them, can be had from here; they are imported when first used, so
that `import tezo` itself is quick.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tezo.errors import NonFiniteLossError as NonFiniteLossError
from tezo.errors import RequestError as RequestError
from tezo.errors import RunError as RunError
from tezo.errors import TezoError as TezoError

if TYPE_CHECKING:
    from tezo.models.lora import export_adapter as export_adapter
    from tezo.optim.methods import METHODS as METHODS
    from tezo.optim.methods import lozo as lozo
    from tezo.optim.methods import lozo_adam as lozo_adam
    from tezo.optim.methods import lozo_m as lozo_m
    from tezo.optim.methods import mezo as mezo
    from tezo.optim.methods import mezo_adam as mezo_adam
    from tezo.optim.methods import mezo_m as mezo_m
    from tezo.optim.methods import subzo as subzo
    from tezo.optim.methods import tezo as tezo
    from tezo.optim.methods import tezo_adam as tezo_adam
    from tezo.optim.methods import tezo_cadam as tezo_cadam
    from tezo.optim.methods import tezo_m as tezo_m
    from tezo.optim.methods import zo_adamu as zo_adamu
    from tezo.optim.optimizer import ZerothOrderOptimizer as ZerothOrderOptimizer

__version__ = version("tezo")

_HOMES = {
    "METHODS": "tezo.optim.methods",
    "ZerothOrderOptimizer": "tezo.optim.optimizer",
    "export_adapter": "tezo.models.lora",
    "lozo": "tezo.optim.methods",
    "lozo_adam": "tezo.optim.methods",
    "lozo_m": "tezo.optim.methods",
    "mezo": "tezo.optim.methods",
    "mezo_adam": "tezo.optim.methods",
    "mezo_m": "tezo.optim.methods",
    "subzo": "tezo.optim.methods",
    "tezo": "tezo.optim.methods",
    "tezo_adam": "tezo.optim.methods",
    "tezo_cadam": "tezo.optim.methods",
    "tezo_m": "tezo.optim.methods",
    "zo_adamu": "tezo.optim.methods",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tezo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
