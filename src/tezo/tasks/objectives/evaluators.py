"""The interface of evaluators, which run a kind of model on batches, and the common part of those in torch.

The output head is applied at selected positions, not at all of them.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tezo.directions.outputs import Places
from tezo.forward.engine import Continuing, Served, Writer
from tezo.forward.layers import LayerFunction, layer_in_torch
from tezo.forward.watching import Watcher, head_rows, hooked
from tezo.system.errors import RequestError
from tezo.tasks.objectives.batch import Batch

T = TypeVar("T")


class Evaluator(ABC):
    """Runs forward passes of a kind of model, with the parameters that the model has at the time of the call.

    A pass of several copies has the rows of one model `copies` times, block after block, and hooks may perturb each
    block differently. Scores are float32 or wider.
    """

    engine: str | None = None
    """Name of the engine that runs the passes, of which rows share their directions and nothing has a gradient; None:
    torch runs them."""
    most_copies: int | None = None
    """Number of models that it computes side by side; None: by the number of tokens."""
    shared_tokens = 0
    """Tokens, padding included, of the inputs that all batches share, such as descriptions of labels."""
    shared_rows = 0
    """Number of these inputs."""

    @abstractmethod
    def option_scores(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        """Returns scores of the options, (copies, B, O); a higher one is more likely, -inf where there is no option."""

    @abstractmethod
    def scores_and_features(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns (scores of the options (B, O), features of each example for a linear probe (B, D)), by one pass.

        Features do not depend on the answer.

        Raises:
            RequestError: they cannot be read.
        """

    def sharing(self, model: Any, copies: int = 1) -> AbstractContextManager[None]:
        """Computes the inputs that all batches share once, while it is open; outside, each example computes them."""
        del model, copies
        return nullcontext()

    def in_torch(self) -> "Evaluator":
        """Returns the evaluator whose passes run the model's modules, for hooks in them."""
        return self

    def shown(self, *, labelled: bool) -> "Evaluator":
        """Returns the evaluator whose passes can be watched: this one, or else that in torch.

        Args:
            labelled: whether rows with options are passed, for which some of the layers will do.
        """
        del labelled
        return self

    def watching(self, model: Any, watcher: Watcher, places: Sequence[Places | None]) -> AbstractContextManager[None]:
        """While open, a watcher looks into the passes, which have these places one after another."""
        return hooked(model, watcher, places)

    def head_rows(self, model: Any, rows_X: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowOutputs.head_rows`."""
        return head_rows(model, rows_X, like)

    def layer_function(self, model: Any, name: str, inputs: int, like: Tensor) -> LayerFunction:
        """See `RowOutputs.layer_function`."""
        return layer_in_torch(model.get_submodule(name), inputs, like)


class TextEvaluator(Evaluator):
    """An evaluator of causal models, whose tokens see only those before them, and whose answers may be any text."""

    @abstractmethod
    def token_log_probs(self, model: Any, batch: Batch, copies: int = 1) -> Tensor:
        """Returns the log-probabilities of the answer tokens, (copies, S, K); 0 where there is none."""

    @abstractmethod
    def token_hits(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns (the log-probabilities of the answer tokens, whether each is the most likely token), (S, K) each.

        0 and False where there is no token.
        """

    @abstractmethod
    def likely_tokens(
        self, model: Any, batch: Batch, tokens_TC: Tensor | None, copies: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns (scores_TC, tokens_TC) of each copy at the T answer tokens; see `tezo.directions.outputs.of_tokens`.

        `tokens_TC`: int64, tokens whose scores are returned; None: the likely ones.
        """

    @abstractmethod
    def continuations(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], wanted: Continuing, copies: int = 1
    ) -> list[list[list[int]]]:
        """Returns, for each copy, the tokens that continue each prompt; those behind its end are to be ignored.

        All copies sample with the same random numbers.
        """

    serves = False
    """Whether the passes run on an OpenAI-compatible server, on which models can have names; see `serve`."""
    most_named = 1
    """Number of models that can have names at once."""

    @abstractmethod
    def writers(self, model: Any, tokenizer: Any, copies: int) -> list[Writer]:
        """Returns what each of `copies` models, `most_named` at most, writes with, while the parameters are as now."""

    def serve(self, model: Any, copies: int, ask: Callable[[Served], T]) -> list[T]:
        """See `Engine.serve`, for each of `copies` models, `most_named` at most."""
        del model, copies, ask
        raise RequestError("torch does not answer by names of models.")


def logits_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> Tensor:
    """Returns the logits (S, K, vocabulary) at `positions_SK` (int64) of each row, float32 or wider.

    The forward pass of a causal or masked model runs on `inputs`, with its soft-capping and scaling. A hook before the
    head keeps only the hidden states at these positions. If the model never calls its head as a module, all logits
    are computed and the needed ones selected.
    """
    picked = False

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        nonlocal picked
        picked = True
        return (_pick(of_text(args[0], inputs["input_ids"]), positions_SK), *args[1:])

    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(keep) if head is not None else nullcontext():
        logits = model(**inputs, **no_cache(model)).logits
    if not picked:
        logits = _pick(of_text(logits, inputs["input_ids"]), positions_SK)
    wide: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide


def logits_and_hidden_at(model: Any, inputs: dict[str, Tensor], positions_SK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits as `logits_at` does, and the inputs of the model's head there, (S, K, D).

    Raises:
        RequestError: the model does not call its head as a module.
    """
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(lambda _, args: seen.append(args[0])) if head is not None else nullcontext():
        logits = logits_at(model, inputs, positions_SK)
    if not seen:
        raise RequestError("probe is set, but the input of this model's output head cannot be read; leave it out.")
    return logits, _pick(of_text(seen[-1], inputs["input_ids"]), positions_SK)


def of_text(values_SLD: Tensor, input_ids_SL: Tensor) -> Tensor:
    """Returns the outputs at the positions of the input, without those of the virtual tokens before it."""
    return values_SLD[:, values_SLD.shape[1] - input_ids_SL.shape[1] :]


def _pick(values_SLD: Tensor, positions_SK: Tensor) -> Tensor:
    rows_S1 = torch.arange(values_SLD.shape[0], device=values_SLD.device).unsqueeze(1)
    return values_SLD[rows_S1, positions_SK.to(values_SLD.device)]


def base_of(model: Any) -> Any:
    """Returns the model of transformers, which PEFT may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def no_cache(model: Any) -> dict[str, bool]:
    """Returns the keyword that turns off the cache of keys and values, if the model has it."""
    return {"use_cache": False} if "use_cache" in inspect.signature(base_of(model).forward).parameters else {}


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Widens lookups that a model does once for all rows, such as positions, to one per row, while it is open.

    Hooks that assign rows to copies need this. `model` must be called with `input_ids` as a keyword.
    """
    rows = 1

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module, args
        nonlocal rows
        rows = len(kwargs["input_ids"])

    def widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        del module
        if args and isinstance(args[0], Tensor) and args[0].ndim == 2 and len(args[0]) == 1:
            return (args[0].expand(rows, -1), *args[1:])
        return None

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(note, with_kwargs=True))
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.enter_context(module.register_forward_pre_hook(widen))
        yield
