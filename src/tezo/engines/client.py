"""Requests to a server of vLLM, each of which is answered in full, or ends in a sentence that names the server.

An answer that is not one to what was asked is asked for once more, and refused then.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from tezo.engines.completions import (
    Model,
    answers_of,
    check_loaded,
    continuations_of,
    models_of,
    states_file,
    states_of,
    tokens_of,
)
from tezo.engines.connection import Connection, Reply, shown
from tezo.engines.prompts import Answer, Prompt
from tezo.engines.states import SECONDS_OF_A_FILE, Leftovers, StatesFile, load_states
from tezo.forward.answers import MalformedError, once_more
from tezo.forward.engine import Continuing, EngineLostError, EngineRefusesError
from tezo.system.errors import RequestError

LEAST_BYTES, BYTES_OF_A_TOKEN = 1 << 20, 1 << 9
"""Room for an answer, and for each token in it, of which vLLM 0.32 writes about 70 bytes."""
BUSY = (408, 429)
"""Statuses of a server that may answer later."""
RANK_LIMIT = "max_lora_rank"
"""The answer of a server that has no room for an adapter names it."""
UNSEEN = "No adapter found"
"""The answer of a server that does not see the folder of an adapter has it."""
FOLDER = "TEZO_ADAPTERS"
"""Variable of the environment: a folder that the server sees too."""
AS_THE_MODEL_SAYS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""In place of what the server reads in generation_config.json: nothing is left out, and nothing penalised."""
MODELS, TOKENIZE, COMPLETIONS = "/v1/models", "/tokenize", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
T = TypeVar("T")


class FailedError(EngineLostError):
    """A server answers that it failed, as it does while it is being ended, and where it was asked too much."""


class Client:
    """What a server of vLLM can be asked. All methods raise the same errors.

    Args:
        address: of the server, without /v1.

    Raises:
        EngineLostError: the server does not answer, or fails.
        RequestError: it refuses, or does not answer as vLLM does, twice.
    """

    def __init__(self, address: str) -> None:
        self._connection = Connection(address)
        self._leftovers = Leftovers()

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._connection.address

    def models(self) -> list[Model]:
        """Returns its models and adapters, of which one at least is a model."""
        return self._asked("GET", MODELS, None, lambda reply: models_of(reply.json()))

    def tokens(self, model: str, text: str, vocabulary: int) -> list[int]:
        """Returns the tokens of a text, all below `vocabulary`, without those that a tokenizer adds."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._asked("POST", TOKENIZE, body, lambda reply: tokens_of(reply.json(), vocabulary))

    def load(self, name: str, folder: Path) -> None:
        """Has the server load the adapter in a folder."""
        body = {"lora_name": name, "lora_path": str(folder)}
        self._asked("POST", LOAD, body, lambda reply: check_loaded(reply, name))

    def unload(self, name: str) -> None:
        """Has the server forget an adapter."""
        self._asked("POST", UNLOAD, {"lora_name": name}, lambda _: None)

    def answers(self, model: str, prompts: Sequence[Prompt], likely: int, vocabulary: int) -> list[Answer]:
        """Returns the answers to prompts that all want the same tokens, see `answers_of`."""
        wanted = prompts[0].wanted
        body: dict[str, Any] = {"model": model, "prompt": [list(prompt.tokens) for prompt in prompts]}
        body |= {"max_tokens": 1, "temperature": 0, "return_token_ids": True, **AS_THE_MODEL_SAYS}
        if wanted:
            body |= {"logprobs": 1, "logprob_token_ids": list(wanted), "return_tokens_as_token_ids": True}
        else:
            body |= {"prompt_logprobs": likely}
        count = sum(len(prompt.tokens) * (likely + 2) + len(wanted) for prompt in prompts)
        return self._asked(
            "POST",
            COMPLETIONS,
            body,
            lambda reply: answers_of(self._completion(reply), model, prompts, likely, vocabulary),
            count,
        )

    def continuations(
        self, model: str, prompts: Sequence[Sequence[int]], wanted: Continuing, vocabulary: int
    ) -> list[list[int]]:
        """Returns the tokens that continue each prompt, see `continuations_of`.

        A request has one seed for all of its prompts, under which equal prompts have equal answers. So of sampled
        answers no request has a prompt twice.
        """
        if not wanted.seeds:
            return self._continued(model, prompts, wanted, vocabulary)
        requests, times = list[list[int]](), Counter[tuple[int, ...]]()
        for place, prompt in enumerate(prompts):
            turn = times[tuple(prompt)]
            times[tuple(prompt)] += 1
            if turn == len(requests):
                requests.append([])
            requests[turn].append(place)
        found: list[list[int]] = [[]] * len(prompts)
        for places in requests:
            own = replace(wanted, seeds=[wanted.seeds[place] for place in places])
            answers = self._continued(model, [prompts[place] for place in places], own, vocabulary)
            for place, tokens in zip(places, answers, strict=True):
                found[place] = tokens
        return found

    def _continued(
        self, model: str, prompts: Sequence[Sequence[int]], wanted: Continuing, vocabulary: int
    ) -> list[list[int]]:
        body: dict[str, Any] = {"model": model, "prompt": [list(prompt) for prompt in prompts]}
        body |= {"max_tokens": wanted.most, "temperature": wanted.temperature, "stop_token_ids": list(wanted.ends)}
        body |= {"return_token_ids": True, **AS_THE_MODEL_SAYS}
        body |= {"stop": ["\n"]} if wanted.one_line else {}
        body |= {"seed": wanted.seeds[0]} if wanted.seeds else {}  # one for all prompts of a request
        count = sum(len(prompt) + wanted.most for prompt in prompts)
        return self._asked(
            "POST",
            COMPLETIONS,
            body,
            lambda reply: continuations_of(self._completion(reply), model, prompts, wanted.most, vocabulary),
            count,
        )

    def states_file(self, model: str, prompt: Sequence[int]) -> StatesFile | None:
        """Returns the file with the states of a prompt, see `states_of`; it is removed later."""
        file = self._of_states(model, prompt, lambda file: file)
        if file is not None:
            self._leftovers.add(file)
        return file

    def states(self, model: str, prompt: Sequence[int], seconds: float = SECONDS_OF_A_FILE) -> Tensor:
        """Returns the states of a prompt, see `load_states`."""

        def read(file: StatesFile | None) -> Tensor:
            if file is None:
                raise MalformedError("no path of states, which an answer had before")
            return load_states(file, prompt, seconds)

        return self._of_states(model, prompt, read)

    def _of_states(self, model: str, prompt: Sequence[int], read: Callable[[StatesFile | None], T]) -> T:
        body: dict[str, Any] = {"model": model, "prompt": [list(prompt)], "max_tokens": 1, "temperature": 0}
        body |= {"return_token_ids": True, **AS_THE_MODEL_SAYS}
        return self._asked(
            "POST", COMPLETIONS, body, lambda reply: read(states_of(reply.json(), model, prompt)), len(prompt)
        )

    def _completion(self, reply: Reply) -> Any:
        """Returns an answer of /v1/completions; files with states that nobody reads are noted, to be removed."""
        found = reply.json()
        if (file := states_file(found)) is not None:
            self._leftovers.add(file)
        return found

    def _asked(self, verb: str, path: str, body: Any, read: Callable[[Reply], T], tokens: int = 0) -> T:
        """Sends a request, and once more where the answer cannot be read.

        Args:
            verb: GET or POST.
            path: of the request.
            body: JSON value.
            read: answer -> what it says; raises a `MalformedError`.
            tokens: that the answer may have, of prompts and of what is asked for.
        """

        def ask() -> T:
            reply = self._connection.send(verb, path, body, LEAST_BYTES + BYTES_OF_A_TOKEN * tokens)
            self._check_status(path, reply)
            return read(reply)

        subject = f"model.engine: the server at {self.address} does not answer {path} as vLLM does:"
        return once_more(ask, subject, "give the address of a vLLM server that no other program stands before")

    def _check_status(self, path: str, reply: Reply) -> None:
        status, text = reply.status, reply.text
        too_large = RANK_LIMIT in text  # told as a failure of the server's, and no less final
        gone = status == 404 and path == COMPLETIONS  # the adapter, where the server was started anew
        if (status >= 500 and not too_large) or status in BUSY or gone:
            raise FailedError(f"model.engine: the server at {self.address} fails: {_said(reply)}")
        if status == 404 and path == LOAD and UNSEEN in text:
            raise RequestError(
                f"model.engine: the server at {self.address} does not see the folder of an adapter; set {FOLDER} to a "
                "folder that it sees too."
            )
        if status == 404 and path in (LOAD, UNLOAD):
            raise RequestError(
                f"model.engine: the server at {self.address} takes no adapters while it runs; start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora."
            )
        if status >= 400 and not (status == 404 and path in (MODELS, TOKENIZE)):
            raise EngineRefusesError(f"model.engine: the server at {self.address} refuses: {_said(reply)}")
        if status != 200:
            to = f" to {shown(reply.place)}" if reply.place else ""
            raise MalformedError(f"status {status}{to}")


def _said(reply: Reply) -> str:
    """Returns the first sentence of an answer that is an error, with the way out where it is known."""
    text = reply.text
    with suppress(MalformedError, KeyError, TypeError):
        text = str(reply.json()["error"]["message"])
    text = (
        " ".join("".join(sign if sign.isprintable() else " " for sign in text).split()).partition(". ")[0].rstrip(".")
    )
    lower = "; start it with a larger --max-lora-rank, or lower method.rank and method.frozen_rank"
    way_out = lower if RANK_LIMIT in text else ""
    return (text if len(text) <= 300 else f"{text[:300]} ...") + f"{way_out}."
