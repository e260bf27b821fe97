"""What belongs to one model in one process."""

from typing import NoReturn

from tezo.errors import RequestError


class Uncopied:
    """What neither copy nor pickle takes along: a copy of a model would share the hooks of the original."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        del protocol
        raise RequestError(
            f"copy or pickle: {type(self).__name__} belongs to one model in this process, and so do the hooks of a "
            "model that is being tuned; call merge() or close() first, or save model.state_dict(), which is a snapshot."
        )
