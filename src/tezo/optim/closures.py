"""The interfaces of closures: losses of several models in one pass, losses of each row, outputs of each row.

Any function that returns a loss is a closure. One that is more lets an estimator ask for more: `Losses` is enough for
two-point steps, `RowLosses` for steps that compare rows or perturb each differently, `RowOutputs` for those that fit a
model of the scores. `tezo.closure` and the objectives of `tezo.tasks` make closures that are all three. `RowAnswers`
are prompts, for steps that learn from what the model writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn

from tezo.directions.outputs import Outputs, Places
from tezo.forward.layers import LayerFunction, layer_in_torch
from tezo.forward.watching import Watcher, head_rows, hooked

Closure = Callable[[], Tensor | float]

NO_OUTPUTS = (
    "this method needs the outputs of each row, and the closure returns only a loss; give one of tezo.closure(model, "
    "batch), or choose another method."
)


class Losses(ABC):
    """An objective on rows, of which one forward pass can evaluate several perturbed models.

    A pass has the rows of one model `copies` times, block after block.
    """

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Largest number of tokens, padding included, of a forward pass for one model."""

    @property
    def most_copies(self) -> int | None:
        """Number of models that whatever runs the passes computes side by side; None: by the number of tokens."""
        return None

    @abstractmethod
    def losses(self, copies: int) -> Tensor:
        """Returns the loss of each of `copies` models: (copies,), float32 or wider."""

    def summands(self) -> Iterator[Tensor]:
        """Yields scalars whose sum is the loss of one model, computed in turn, no two of which share a graph."""
        yield self.losses(1)[0]

    def __call__(self) -> Tensor:
        """Returns the loss of one model: scalar, float32 or wider."""
        return self.losses(1)[0]


class RowLosses(Losses):
    """Losses that are known for each example."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """Number of examples."""

    @property
    def example_tokens(self) -> int:
        """As `tokens`, if perturbations are per example and examples share no input."""
        return self.tokens

    @abstractmethod
    def example_losses(self, copies: int) -> Tensor:
        """Returns the loss of each example for each copy, (copies, examples); their mean is the objective."""

    @abstractmethod
    def example_passes(self) -> Sequence[Sequence[int]]:
        """Returns, for each forward pass of `example_losses`, the example of each row of one copy.

        Raises:
            RequestError: the rows of a pass are not known before it.
        """


class RowOutputs(Losses):
    """Losses whose rows' scores can be read: a loss is the mean over the places of `Outputs`."""

    @property
    def stepped(self) -> int | None:
        """How many of the examples, the first ones, are those of the step; None: all."""
        return None

    @property
    def are_texts(self) -> bool:
        """Whether a place is a token of an answer in free text."""
        return False

    @property
    def held_out(self) -> "RowOutputs | None":
        """Rows that nothing is fitted to, by which a step may be shortened; None: there are none."""
        return None

    @abstractmethod
    def outputs(self, like: Outputs | None = None) -> Outputs:
        """Returns the outputs of the model as it is.

        Args:
            like: earlier outputs of these rows, whose classes are taken; None: those that are likely now.
        """

    @abstractmethod
    def places(self) -> Sequence[Places | None]:
        """Returns where the places are, for each forward pass of `outputs`; None: the pass has other rows."""

    def deciding_tokens(self) -> Tensor | None:
        """Returns the token of each class whose prediction is read at a place, (C,) int64; None: there is none."""
        return None

    def watching(self, model: nn.Module, watcher: Watcher) -> AbstractContextManager[None]:
        """While open, a watcher looks into the passes of `outputs`, which are passes of this model."""
        return hooked(model, watcher, self.places())

    def head_rows(self, model: nn.Module, rows_X: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows of the output head (X, D), their trained change included, and their bias (X,): float32.

        Args:
            model: the model.
            rows_X: which rows, (X,), int64.
            like: inputs of the head, (..., D).

        Raises:
            RequestError: they cannot be read.
        """
        return head_rows(model, rows_X, like)

    def layer_function(self, model: nn.Module, name: str, inputs: int, like: Tensor) -> LayerFunction:
        """Returns a linear layer of the model, its trained change included, as a function outside of a pass.

        Args:
            model: the model.
            name: of the module.
            inputs: size of its inputs, I.
            like: a tensor of the type and on the device in which torch computes it.

        Raises:
            RequestError: it cannot be read.
        """
        return layer_in_torch(model.get_submodule(name), inputs, like)

    def outputs_of(self, copies: int, like: Outputs | None = None) -> list[Outputs]:
        """Returns the outputs of each of `copies` models, more than one only where `most_copies` allows it.

        `like`: see `outputs`.
        """
        del copies
        return [self.outputs(like)]


@dataclass(frozen=True)
class Answers:
    """Answers that a model has written to prompts, and their scores. An answer may be several texts, as of an agent.

    Attributes:
        rows: the X texts of all answers as free text, in the tokens that were written; None: there are none.
        answer_X: number of the answer that each is a part of, int64.
        prompt_E: number of the prompt of each answer, int64.
        score_E: of each answer, float64; NaN: it is missing.
    """

    rows: RowOutputs | None
    answer_X: Tensor
    prompt_E: Tensor
    score_E: Tensor


class RowAnswers(Losses):
    """Minus the mean score of what the model writes to some prompts."""

    @property
    @abstractmethod
    def prompts(self) -> int:
        """Number of prompts."""

    @abstractmethod
    def write(self, prompts: Sequence[int], count: int) -> Answers:
        """Has the model, as it is, write answers, each token drawn by its probability.

        Args:
            prompts: numbers of prompts, in ascending order from call to call.
            count: answers to each of them.
        """

    @abstractmethod
    def written_loss(self) -> float:
        """Returns minus the mean score of all answers so far.

        Raises:
            RequestError: nothing was written, or no answer has a score.
        """

    @property
    @abstractmethod
    def are_alike(self) -> bool:
        """Whether all answers so far to each prompt have the same score."""
