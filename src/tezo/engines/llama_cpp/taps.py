"""What llama.cpp's evaluation callback does with each node of a graph: it hands them to a visitor.

llama.cpp asks of each node whether its data is wanted, before it computes it, and shows those that are, after.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tezo.engines.llama_cpp.library import EVALUATION_CALLBACK


class Visitor(Protocol):
    """Looks at nodes, by their addresses."""

    def wants(self, node: int) -> bool:
        """Returns whether a node, which is not computed yet, is to be shown."""
        ...

    def take(self, node: int) -> None:
        """Is shown a node that has been computed, whose values may be changed."""
        ...


class Taps:
    """The callback of a context.

    Attributes:
        callback: the function, which lives as long as the context.
        visits: number of nodes that it has been asked about.
    """

    def __init__(self) -> None:
        self.callback: Any = EVALUATION_CALLBACK(self._called)
        self.visits = 0
        self._visitor: Visitor | None = None
        self._failure: BaseException | None = None

    @contextmanager
    def visited_by(self, visitor: Visitor) -> Iterator[None]:
        """Hands nodes to a visitor while open; raises at the end what the visitor has raised."""
        self._visitor, self._failure = visitor, None
        try:
            yield
        finally:
            self._visitor, failure = None, self._failure
            self._failure = None
            if failure is not None:
                raise failure

    def _called(self, node: int, is_asked: bool, user: Any) -> bool:
        del user
        self.visits += 1
        if self._visitor is None or self._failure is not None:
            return not is_asked
        try:
            if is_asked:
                return self._visitor.wants(node)
            self._visitor.take(node)
        except BaseException as error:  # it cannot pass through C
            self._failure = error
            return False  # the rest of the graph is not computed
        return True
