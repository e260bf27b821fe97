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
    from tezo.export import export_adapter as export_adapter
    from tezo.methods import METHODS as METHODS
    from tezo.methods import lozo as lozo
    from tezo.methods import lozo_adam as lozo_adam
    from tezo.methods import lozo_m as lozo_m
    from tezo.methods import mezo as mezo
    from tezo.methods import mezo_adam as mezo_adam
    from tezo.methods import mezo_m as mezo_m
    from tezo.methods import subzo as subzo
    from tezo.methods import tezo as tezo
    from tezo.methods import tezo_adam as tezo_adam
    from tezo.methods import tezo_cadam as tezo_cadam
    from tezo.methods import tezo_m as tezo_m
    from tezo.methods import zo_adamu as zo_adamu
    from tezo.optimizer import ZerothOrderOptimizer as ZerothOrderOptimizer

__version__ = version("tezo")

_HOMES = {
    "METHODS": "tezo.methods",
    "ZerothOrderOptimizer": "tezo.optimizer",
    "export_adapter": "tezo.export",
    "lozo": "tezo.methods",
    "lozo_adam": "tezo.methods",
    "lozo_m": "tezo.methods",
    "mezo": "tezo.methods",
    "mezo_adam": "tezo.methods",
    "mezo_m": "tezo.methods",
    "subzo": "tezo.methods",
    "tezo": "tezo.methods",
    "tezo_adam": "tezo.methods",
    "tezo_cadam": "tezo.methods",
    "tezo_m": "tezo.methods",
    "zo_adamu": "tezo.methods",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tezo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
