"""The interface of engines: forward passes of a model whose weights another program holds.

An engine is given texts, places in them, and changes of the weights as low-rank factors. It returns log-probabilities
of tokens at the places. It knows nothing of directions, losses or methods, and these know nothing of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from tezo.forward.perturbed_parameter import open_on
from tezo.system.errors import RequestError

T = TypeVar("T")

Change = Mapping[str, tuple[Tensor, Tensor]]
"""Module name -> (A_RI, B_OR): x A^T B^T is added to the output of a linear layer. Modules that are not named, and all
of an empty mapping, compute with the stored weights."""

NOTHING = -1
"""The mark of a token that is not asked for."""

HEAD = "the output head"
"""In the place of a module: the output head, whatever the engine calls it."""


@dataclass(frozen=True)
class Asked:
    """A request to an engine: the next token at P places of texts, and C tokens of interest at each.

    Attributes:
        texts: token ids of each text, which ends at the last place in it. In a group no text is the beginning of
            another, and no two places have the same tokens up to them.
        text_P: int64, text of each place, ascending.
        position_P: int64, position in the text of the last token that is seen, ascending within a text.
        tokens_PC: int64, tokens whose log-probabilities are asked for; `NOTHING` where a place has fewer.
        likely: number of most likely tokens that are asked for besides.
        group_T: int64, group of each text; None: all are of one. Texts of one group may be computed together.
    """

    texts: Sequence[Sequence[int]]
    text_P: Tensor
    position_P: Tensor
    tokens_PC: Tensor
    likely: int
    group_T: Tensor | None = None


@dataclass(frozen=True)
class Watch:
    """Layers that a pass looks into, and what it adds to their outputs.

    Attributes:
        inputs: modules whose inputs are kept at the places of `Asked`.
        means: whether the means of these inputs over the tokens up to each place, itself among them, are kept too.
        places: int64, ascending, the places at which inputs are kept; None: all.
        added: module -> vectors for each text, float32: (tokens, M) one for each token, or (1, M) for all. Texts of one
            group have the same vectors at the tokens that they share.
    """

    inputs: Sequence[str] = ()
    means: bool = False
    places: Tensor | None = None
    added: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer at P places.

    Attributes:
        at_PI: at the places, float32 or as the model computes; None: these have no position.
        mean_PI: means over the tokens up to each place; None: they were not asked for.
        output_square: mean square of the layer's outputs at the places, or of their means.
    """

    at_PI: Tensor | None
    mean_PI: Tensor | None
    output_square: float


@dataclass(frozen=True)
class Told:
    """The answer of an engine for one model, at the places of a request.

    Attributes:
        log_probs_PC: float32, log-probabilities of the tokens that were asked for; 0 in the place of `NOTHING`.
        likely_PL: int64, the most likely tokens, the likeliest first.
        likely_log_probs_PL: float32, their log-probabilities.
    """

    log_probs_PC: Tensor
    likely_PL: Tensor
    likely_log_probs_PL: Tensor

    def at(self, order_P: Tensor) -> "Told":
        """Returns the answer at these places."""
        return Told(self.log_probs_PC[order_P], self.likely_PL[order_P], self.likely_log_probs_PL[order_P])


@dataclass(frozen=True)
class Watched:
    """The answer of an engine that looks into layers.

    Attributes:
        told: what is asked for.
        inputs: module -> its inputs, in the order in which layers are called.
        times: how often the texts were computed.
    """

    told: Told
    inputs: Mapping[str, LayerInputs]
    times: int = 1


@dataclass(frozen=True)
class Continuing:
    """How prompts are continued.

    Attributes:
        most: number of tokens after which a continuation is cut.
        ends: tokens that end one.
        one_line: whether a line break ends one.
        noisy: (logits, rows, place of the token) -> values whose largest is the next token; None: the logits are.
        temperature: of the sampling that `noisy` does; 0: greedy.
        seeds: one for each prompt, for an engine that draws its random numbers itself.
        ended: (row, its tokens) -> whether these are all, though no token of `ends` is the last; None: they never are.
        heard: called with each new token of a single prompt, by an engine that `streams`.
    """

    most: int
    ends: Sequence[int]
    one_line: bool
    noisy: Callable[[Tensor, Sequence[int], int], Tensor] | None = None
    temperature: float = 0.0
    seeds: Sequence[int] = ()
    ended: Callable[[int, Sequence[int]], bool] | None = None
    heard: Callable[[int], None] | None = None

    def is_end(self, row: int, tokens: Sequence[int]) -> bool:
        """Returns whether these tokens are all of a row's continuation."""
        return tokens[-1] in self.ends or (self.ended is not None and self.ended(row, tokens))

    def chosen(self, logits: Tensor, rows: Sequence[int], place: int) -> list[int]:
        """Returns the next token of each row."""
        values = logits if self.noisy is None else self.noisy(logits, rows, place)
        found: list[int] = values.argmax(-1).tolist()
        return found


Writer = Callable[[Sequence[Sequence[int]], Continuing], list[list[int]]]
"""(prompts, how they are continued) -> the tokens that one model writes after each of them."""


@dataclass(frozen=True)
class Named:
    """A model that answers by its name on an OpenAI-compatible server.

    Attributes:
        base_url: address of the server, with /v1.
        model: the name, which no other model has or had.
    """

    base_url: str
    model: str


@dataclass(frozen=True)
class Served(Named):
    """A model that has a name on the server of an engine.

    Attributes:
        write: what writes under this name, in any thread.
    """

    write: Writer


class EngineLostError(RequestError):
    """An engine is gone, and may come back: a server that was ended, a worker that died."""


class EngineRefusesError(RequestError):
    """An engine refuses a request, such as a prompt that is too long for it."""


def told_by(logits_PV: Tensor, tokens_PC: Tensor, likely: int) -> Told:
    """Returns the answer by logits over a vocabulary, float32: these tokens, and the `likely` likeliest."""
    normal_P1 = logits_PV.logsumexp(1, keepdim=True)
    log_probs_PC = logits_PV.gather(1, tokens_PC.clamp_min(0)) - normal_P1
    values_PL, likely_PL = logits_PV.topk(likely)
    return Told(log_probs_PC.masked_fill(tokens_PC == NOTHING, 0.0), likely_PL, values_PL - normal_P1)


def joined(parts: Sequence[Told]) -> Told:
    """Returns the answer at all places, in order."""
    return Told(
        torch.cat([part.log_probs_PC for part in parts]),
        torch.cat([part.likely_PL for part in parts]),
        torch.cat([part.likely_log_probs_PL for part in parts]),
    )


class Engine(ABC):
    """A program that runs forward passes of a causal model."""

    name: str
    """Value of `model.engine`."""

    at_once = 1
    """Number of changes that it computes side by side."""

    streams = False
    """Whether `generate` calls `Continuing.heard` as it writes."""

    serves = False
    """Whether it is an OpenAI-compatible server, on which changes can have names; see `serve`."""

    @abstractmethod
    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        """Returns the requested log-probabilities, for each of the changes.

        Raises:
            RequestError: a change is of a layer that the engine does not change, or the engine fails.
        """

    @abstractmethod
    def changes(self, module: str) -> bool:
        """Returns whether the engine can change the weight of this linear layer."""

    def reserve(self, rank: int, modules: Sequence[str] = ()) -> list[str]:
        """Makes room for changes of this rank, the largest that will be asked for, of these modules.

        Returns:
            What could not be checked of the engine, in sentences for the user.

        Raises:
            RequestError: the engine takes no change of this rank, or computes it otherwise than it is.
        """
        del rank, modules
        return []

    def check_changes(self) -> None:
        """Checks that the engine computes with the changes that it is sent, as one in this process always does.

        Raises:
            RequestError: it ignores them.
        """
        return

    def hidden(self, change: Change, texts: Sequence[Sequence[int]]) -> Tensor:
        """Returns the inputs of the output head at the last token of each text, (texts, D) in float32.

        Raises:
            RequestError: the engine does not return them.
        """
        del change, texts
        raise RequestError(f"the input of the output head cannot be read from {self.name}.")

    def watches(self, module: str) -> bool:
        """Returns whether `watch` can keep the inputs of this linear layer, and add to its outputs."""
        del module
        return False

    @property
    def watches_some(self) -> bool:
        """Whether `watch` shows at least the layers that a look at labelled rows needs."""
        return self.watches(HEAD)

    def watch(self, change: Change, asked: Asked, watch: Watch) -> Watched:
        """Returns what is asked for, and the inputs of layers there.

        An engine that `watches_some` leaves out those that it does not show. Layers with the same input, such as
        queries, keys and values, have the same tensors. The inputs of `HEAD` are those of the output head.

        Raises:
            RequestError: the engine does not look into these layers.
        """
        del change, asked
        layer = next(iter([*watch.inputs, *watch.added]), "a layer")
        raise RequestError(f"the inputs of {layer} cannot be read from {self.name}.")

    def head_rows(self, rows_X: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows of the output head (X, D), and their bias (X,): float32.

        Args:
            rows_X: which rows, (X,), int64.

        Raises:
            RequestError: the engine does not show them.
        """
        del rows_X
        raise RequestError(f"the weight of {HEAD} cannot be read from {self.name}.")

    def product(self, layer: str, x: Tensor, transposed: bool) -> Tensor:
        """Returns W x + b of the stored weight of a layer, (P, O), or W^T x, (P, I): float32.

        Args:
            layer: name of the module.
            x: (P, I), or (P, O), float32.
            transposed: whether W^T x is computed.

        Raises:
            RequestError: the engine does not show the weight.
        """
        del x, transposed
        raise RequestError(f"the weight of {layer} cannot be read from {self.name}.")

    @abstractmethod
    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        """Returns, for each change, the tokens that continue each prompt; those behind its end are to be ignored.

        Raises:
            RequestError: the engine does not continue texts in this way.
        """

    def serve(self, changes: Sequence[Change], ask: Callable[[Served], T]) -> list[T]:
        """Returns the value of `ask` for each change, which has a name on the server meanwhile.

        Calls run side by side, each in a thread. A call is repeated where the server has lost the change meanwhile.

        Raises:
            RequestError: the engine is not a server, or does not take the changes.
        """
        del changes, ask
        raise RequestError(f"{self.name} does not answer by names of models.")

    def save_beside(self, rank: int, change: Change, folder: Path) -> str | None:
        """Writes a trained change of rank R into the folder of an adapter; returns the name of the file.

        None: the engine has no such form.
        """
        del rank, change, folder
        return None


def changes_of(model: nn.Module, count: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Returns the change of the weights of a model in each of `count` blocks of rows, by all that tune it now.

    Raises:
        RequestError: the change is not low-rank, or differs for each example.
    """
    found: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(count)]
    for tuned in open_on(model.parameters()):
        blocks = tuned.changes()
        if len(blocks) not in (1, count):
            raise RequestError(
                "method.directions is per-example, which is not computed by an engine; set method.directions=shared."
            )
        for changes, pair in zip(found, blocks * count if len(blocks) == 1 else blocks, strict=True):
            if pair is not None:
                left_MK, right_NK = (factor.detach().float().cpu() for factor in pair)
                changes[tuned.target.sites[0].name] = right_NK.T.contiguous(), left_MK.contiguous()
    return found
