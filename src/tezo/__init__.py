"""tezo: fine-tuning by forward passes alone."""

from importlib.metadata import version

from tezo.errors import NonFiniteLossError as NonFiniteLossError
from tezo.errors import RequestError as RequestError
from tezo.errors import RunError as RunError
from tezo.errors import TezoError as TezoError

__version__ = version("tezo")
