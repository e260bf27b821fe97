"""vLLM: prompts under LoRA adapters, several in one batch, in this process or on a server that the user has started.

A text is a prompt. Log-probabilities of its own next tokens come with the prompt; those of other tokens at a place are
asked for by a prompt that ends there. A change of the weights is a LoRA adapter in PEFT's format with a name that was
never used before: what vLLM has cached of prompts under an earlier adapter is of no other change.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import requests
import torch
from torch import nn
from torch.nn.functional import pad

from tezo.engines.workers import Workers
from tezo.forward.engine import NOTHING, Asked, Change, Continuing, Engine, EngineLostError, Told
from tezo.models.in_file import load_folder
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel, dtype_name
from tezo.models.lora import ALLOWED_RANKS, Adapter, next_allowed, save_adapter
from tezo.system.errors import RequestError

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Changes that are computed side by side; vLLM puts as many of them into a batch as its max_loras allows."""
SECONDS_OF_A_RESTART, FIRST_WAIT = 300.0, 0.5
"""For how long a server that does not answer is asked again, and the first wait; each is twice the one before."""
MOST_FAILURES = 2
"""Times that a server may answer that it failed before it is believed."""
SECONDS_TO_CONNECT, SECONDS_OF_AN_ANSWER = 5.0, 600.0
OWN = f"tezo-{socket.gethostname()}-"
"""What names of adapters of this machine begin with, before the number of the process."""
RANK_LIMIT = "max_lora_rank"
"""What the answer of a server names that has no room for an adapter."""
T = TypeVar("T")
KEY, FOLDER = "VLLM_API_KEY", "TEZO_ADAPTERS"
"""Variables of the environment: the key of a server, and a folder that the server sees too."""


def is_left(name: str) -> bool:
    """Returns whether an adapter or its folder is of a process of this machine that is gone."""
    process = name.removeprefix(OWN).partition("-")[0]
    return name.startswith(OWN) and process.isdigit() and not Path(f"/proc/{process}").exists()


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what it tells of which places.

    Attributes:
        tokens: token ids.
        places: place -> its position in the prompt. Without `wanted` the next token of the prompt is what is asked for.
        wanted: tokens that are asked for at the end of the prompt; empty: log-probabilities of the prompt itself.
    """

    tokens: Sequence[int]
    places: Mapping[int, int]
    wanted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What vLLM tells of one prompt: for each position of the next token, token -> (log-probability, rank from 1)."""

    next: Mapping[int, Mapping[int, tuple[float, int]]]


def prompts_of(asked: Asked) -> list[Prompt]:
    """Returns prompts that tell what is asked for."""
    found: list[Prompt] = []
    places: list[list[int]] = [[] for _ in asked.texts]
    for place, text in enumerate(asked.text_P.tolist()):
        places[text].append(place)
    positions, wanted = (
        asked.position_P.tolist(),
        [[token for token in own if token != NOTHING] for own in asked.tokens_PC.tolist()],
    )
    for text, own in zip(asked.texts, places, strict=True):
        whole = [*text, wanted[own[-1]][0]]
        follows = [p for p in own if wanted[p] == [whole[positions[p] + 1]]]
        if follows:
            end = positions[follows[-1]] + 2
            found.append(Prompt(whole[:end], {p: positions[p] for p in follows}))
        found += [
            Prompt(text[: positions[p] + 1], {p: positions[p]}, tuple(wanted[p])) for p in own if p not in follows
        ]
    return found


def told_of(asked: Asked, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Told:
    """Returns what the answers to these prompts tell."""
    count = len(asked.text_P)
    log_probs_PC = torch.zeros(asked.tokens_PC.shape)
    likely_PL = torch.zeros(count, asked.likely, dtype=torch.int64)
    values_PL = torch.zeros(count, asked.likely)
    for prompt, answer in zip(prompts, answers, strict=True):
        for place, position in prompt.places.items():
            table = answer.next[position + 1]
            for slot, token in enumerate(asked.tokens_PC[place].tolist()):
                if token != NOTHING:
                    log_probs_PC[place, slot] = table[token][0]
            best = sorted(table, key=lambda token: table[token][1])[: asked.likely]
            likely_PL[place] = torch.tensor(best)
            values_PL[place] = torch.tensor([table[token][0] for token in best])
    return Told(log_probs_PC, likely_PL, values_PL)


class Vllm(Engine):
    """A model of vLLM.

    Args:
        model: its modules, for the names of layers.
    """

    at_once = AT_ONCE

    def __init__(self, model: Any) -> None:
        self._model = model
        shared = os.environ.get(FOLDER) or ("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
        self._shared = Path(shared)
        for left in self._shared.glob(f"{OWN}*"):  # by a process that was killed
            if is_left(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def changes(self, module: str) -> bool:
        return self._model.get_submodule(module) is not self._model.get_output_embeddings()

    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        prompts = prompts_of(asked)
        if any(prompt.wanted for prompt in prompts) and asked.likely > 1:
            raise RequestError(f"{self.name} tells the likeliest tokens at places with one right token alone.")
        with contextlib.ExitStack() as files:
            folders = [files.enter_context(self._folder(change)) for change in changes]
            return [told_of(asked, prompts, answers) for answers in self._answers(prompts, folders, asked.likely)]

    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        with contextlib.ExitStack() as files:
            return self._continued(prompts, [files.enter_context(self._folder(change)) for change in changes], wanted)

    @abstractmethod
    def _continued(
        self, prompts: Sequence[Sequence[int]], folders: Sequence[Path], wanted: Continuing
    ) -> list[list[list[int]]]:
        """Returns the continuations under the adapter in each folder."""

    def _no_change(self, rank: int = 1) -> Change:
        name, layer = next(
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and self.changes(name)
        )
        return {name: (torch.zeros(rank, layer.in_features), torch.zeros(layer.out_features, rank))}

    @abstractmethod
    def _answers(self, prompts: Sequence[Prompt], folders: Sequence[Path], likely: int) -> list[list[Answer]]:
        """Returns the answers to all prompts under the adapter in each folder."""

    @contextmanager
    def _folder(self, change: Change) -> Iterator[Path]:
        """Yields a folder with a change as an adapter, which is removed at the end."""
        with tempfile.TemporaryDirectory(prefix=f"{OWN}{os.getpid()}-", dir=self._shared) as name:
            Path(name).chmod(0o755)  # a server may be of another user
            # vLLM 0.32 computes prompts without an adapter under those of others in the batch
            save_adapter(uniform(change or self._no_change()), Path(name), model=self._model, base="")
            yield Path(name)


def uniform(change: Change) -> Adapter:
    """Returns a change as an adapter of one rank."""
    rank = max(a_RI.shape[0] for a_RI, _ in change.values())
    pairs = {}
    for name, (a_RI, b_OR) in change.items():
        more = rank - a_RI.shape[0]
        pairs[name] = pad(a_RI, (0, 0, 0, more)), pad(b_OR, (0, more)).contiguous()
    return Adapter(rank, pairs)


def load_vllm(config: ModelConfig) -> LoadedModel:
    """Loads a model into vLLM in this process.

    Raises:
        RequestError: vLLM is missing, or cannot run the model.
    """
    loaded, source = load_folder(config.name, config.dtype)
    dtype = dtype_name(loaded.model.config.dtype)
    return replace(loaded, engine=InProcess(source, loaded.model), dtype=dtype)


class InProcess(Vllm):
    """vLLM in this process, started for the largest rank of a change, which its memory and time depend on.

    It is started again where a larger one comes.

    Args:
        source: folder of the model.
        model: its modules.
    """

    name = "vllm"

    def __init__(self, source: str, model: Any) -> None:
        super().__init__(model)
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise RequestError(
                f"model.engine is vllm, which is not installed here ({error}); install it, or give the address of a "
                "server: --engine http://HOST:8000."
            ) from None
        self._source, self._rank, self._number = source, 0, 0
        self._llm: Any = None

    def reserve(self, rank: int) -> None:
        if rank <= self._rank:
            return
        if rank > ALLOWED_RANKS[-1]:
            raise RequestError(
                f"model.engine is vllm, whose adapters have rank {ALLOWED_RANKS[-1]} at most, and this one has {rank}; "
                "lower method.rank or method.frozen_rank."
            )
        from vllm import LLM

        self._end()
        last = sorted({name.rpartition(".")[2] for name, module in self._model.named_modules()
                       if isinstance(module, nn.Linear) and self.changes(name)})  # fmt: skip
        self._rank = next_allowed(rank)
        self._llm = LLM(
            model=self._source,
            # vLLM's own choice for float32 is half of it
            dtype=str(self._model.config.dtype or "auto").removeprefix("torch."),
            enable_lora=True,
            max_loras=AT_ONCE,
            max_lora_rank=self._rank,
            lora_target_modules=last,  # the head's LoRA breaks log-probabilities of prompts
            enforce_eager=True,
            disable_log_stats=True,
        )

    def _end(self) -> None:
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        core, self._llm = self._llm.llm_engine.engine_core, None
        core.shutdown()
        cleanup_dist_env_and_memory()

    def _answers(self, prompts: Sequence[Prompt], folders: Sequence[Path], likely: int) -> list[list[Answer]]:
        from vllm import SamplingParams, TokensPrompt

        options = [
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                logprob_token_ids=list(prompt.wanted) or None,
                prompt_logprobs=None if prompt.wanted else likely,
            )
            for prompt in prompts
        ]
        adapters = self._adapters(folders)
        texts = [TokensPrompt(prompt_token_ids=list(prompt.tokens)) for prompt in prompts] * len(folders)
        under = [adapter for adapter in adapters for _ in prompts]
        outputs = self._llm.generate(texts, options * len(folders), lora_request=under, use_tqdm=False)
        every = zip(list(prompts) * len(folders), outputs, strict=True)
        found = [self._answer(prompt, output) for prompt, output in every]
        for adapter in adapters:
            self._llm.llm_engine.remove_lora(adapter.lora_int_id)
        return [found[start : start + len(prompts)] for start in range(0, len(found), len(prompts))]

    def _continued(
        self, prompts: Sequence[Sequence[int]], folders: Sequence[Path], wanted: Continuing
    ) -> list[list[list[int]]]:
        from vllm import SamplingParams, TokensPrompt

        more: dict[str, Any] = {"stop": ["\n"]} if wanted.one_line else {}
        more |= {"max_tokens": wanted.most, "temperature": wanted.temperature, "stop_token_ids": list(wanted.ends)}
        seeds: Sequence[int | None] = wanted.seeds or [None] * len(prompts)
        options = [SamplingParams(seed=seed, **more) for seed in seeds]
        adapters = self._adapters(folders)
        texts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts] * len(folders)
        under = [adapter for adapter in adapters for _ in prompts]
        outputs = self._llm.generate(texts, options * len(folders), lora_request=under, use_tqdm=False)
        for adapter in adapters:
            self._llm.llm_engine.remove_lora(adapter.lora_int_id)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        return [found[start : start + len(prompts)] for start in range(0, len(found), len(prompts))]

    @contextmanager
    def _folder(self, change: Change) -> Iterator[Path]:
        self.reserve(max((a_RI.shape[0] for a_RI, _ in change.values()), default=1))
        with super()._folder(change) as folder:
            yield folder

    def _adapters(self, folders: Sequence[Path]) -> list[Any]:
        from vllm.lora.request import LoRARequest

        adapters = []
        for folder in folders:
            self._number += 1  # a number that was used before is a cached adapter
            adapters.append(LoRARequest(f"tezo-{self._number}", self._number, str(folder)))
        return adapters

    def _answer(self, prompt: Prompt, output: Any) -> Answer:
        def table(entry: Any) -> dict[int, tuple[float, int]]:
            return {int(token): (float(own.logprob), int(own.rank)) for token, own in entry.items()}

        if prompt.wanted:
            return Answer({len(prompt.tokens): table(output.outputs[0].logprobs[0])})
        return Answer({i: table(entry) for i, entry in enumerate(output.prompt_logprobs) if entry})


def load_server(config: ModelConfig) -> LoadedModel:
    """Uses a server of vLLM, with runtime LoRA updating, for the passes of a model.

    Raises:
        RequestError: the server does not answer, or has another model.
    """
    loaded, _ = load_folder(config.name)
    addresses = [own.strip() for own in config.engine.split(",")]
    servers = [Server(own, loaded.model, loaded.tokenizer) for own in addresses]
    return replace(loaded, engine=servers[0] if len(servers) == 1 else Workers(servers))


AS_THE_MODEL_SAYS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""In place of what the server reads in generation_config.json: nothing is left out, and nothing penalised."""


class Server(Vllm):
    """A server of vLLM.

    Args:
        address: of it, without /v1.
        model: the modules of its model.
        tokenizer: of its model.
    """

    name = "a vLLM server"
    _is_lost = False
    _saying = Lock()

    def __init__(self, address: str, model: Any, tokenizer: Any) -> None:
        super().__init__(model)
        if "@" in address:
            raise RequestError(f"model.engine has a password in it; put the key of the server into ${KEY} instead.")
        key = os.environ.get(KEY)
        self._address = address.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            models = self._asked("GET", "/v1/models", None)["data"]
            self._base = next(own["id"] for own in models if own.get("parent") is None)
        except (KeyError, TypeError, AttributeError, StopIteration):
            raise self._no_vllm() from None
        self._own = f"{OWN}{os.getpid()}-{secrets.token_hex(4)}"
        for name in (own["id"] for own in models if is_left(own["id"])):
            self._unload(name)
        self._check_same(tokenizer)

    def _check_same(self, tokenizer: Any) -> None:
        text = "The answer, 42 times: naïve."
        found = self._asked("POST", "/tokenize", {"model": self._base, "prompt": text, "add_special_tokens": False})
        if list(found["tokens"]) != list(tokenizer(text, add_special_tokens=False)["input_ids"]):
            raise RequestError(
                f"model.name: the server at {self._address} has {self._base}, whose tokenizer is another one; give the "
                "model that it has."
            )

    def reserve(self, rank: int) -> None:
        with self._folder(self._no_change(rank)) as folder:
            self._again(lambda: self._tried(folder))

    def _tried(self, folder: Path) -> None:
        with self._adapter(folder):
            pass

    def _answers(self, prompts: Sequence[Prompt], folders: Sequence[Path], likely: int) -> list[list[Answer]]:
        with ThreadPoolExecutor(len(folders)) as threads:
            ask = self._answers_under
            return list(threads.map(lambda folder: self._again(lambda: ask(folder, prompts, likely)), folders))

    def _answers_under(self, folder: Path, prompts: Sequence[Prompt], likely: int) -> list[Answer]:
        with self._adapter(folder) as name:
            return self._under(name, prompts, likely)

    def _again(self, ask: Callable[[], T]) -> T:
        """Returns what is answered: asked again where the server has been started anew, and has no adapter any more."""
        begun, wait, failures = time.monotonic(), FIRST_WAIT, 0
        while True:
            try:
                found = ask()
            except EngineLostError as error:
                failures += isinstance(error, _FailedError)
                if failures > MOST_FAILURES or time.monotonic() - begun > SECONDS_OF_A_RESTART:
                    raise
                self._say_lost(error)
                time.sleep(wait)
                wait = min(2 * wait, 10.0)
            else:
                self._is_lost = False
                return found

    def _say_lost(self, error: EngineLostError) -> None:
        with self._saying:  # requests wait side by side, and one of them says so
            known, self._is_lost = self._is_lost, True
        if not known:
            logger.warning("%s It is asked again for %.0f s.", error, SECONDS_OF_A_RESTART)

    @contextmanager
    def _adapter(self, folder: Path) -> Iterator[str]:
        """Loads an adapter, under a name that was never used, and unloads it at the end."""
        name = f"{self._own}-{secrets.token_hex(6)}"
        try:
            self._asked("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            yield name
        finally:
            self._unload(name)

    def _under(self, name: str, prompts: Sequence[Prompt], likely: int) -> list[Answer]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, prompt in enumerate(prompts):
            groups.setdefault(prompt.wanted, []).append(i)
        found: dict[int, Answer] = {}
        for wanted, own in groups.items():
            body = {"model": name, "prompt": [list(prompts[i].tokens) for i in own], "max_tokens": 1, "temperature": 0}
            body |= AS_THE_MODEL_SAYS
            if wanted:
                body |= {"logprobs": 1, "logprob_token_ids": list(wanted), "return_tokens_as_token_ids": True}
            else:
                body |= {"prompt_logprobs": likely}
            choices = self._asked("POST", "/v1/completions", body)["choices"]
            for i, choice in zip(own, sorted(choices, key=lambda choice: choice["index"]), strict=True):
                found[i] = _answer_of(prompts[i], choice)
        return [found[i] for i in range(len(prompts))]

    def _continued(
        self, prompts: Sequence[Sequence[int]], folders: Sequence[Path], wanted: Continuing
    ) -> list[list[list[int]]]:
        body: dict[str, Any] = {"prompt": [list(prompt) for prompt in prompts], "max_tokens": wanted.most}
        body |= {"temperature": wanted.temperature, "stop_token_ids": list(wanted.ends), "return_token_ids": True}
        body |= AS_THE_MODEL_SAYS
        body |= {"stop": ["\n"]} if wanted.one_line else {}
        body |= {"seed": wanted.seeds[0]} if wanted.seeds else {}  # one for all prompts of a request

        def ask(folder: Path) -> list[list[int]]:
            with self._adapter(folder) as name:
                choices = self._asked("POST", "/v1/completions", body | {"model": name})["choices"]
            return [list(own["token_ids"]) for own in sorted(choices, key=lambda own: own["index"])]

        with ThreadPoolExecutor(len(folders)) as pool:  # the server batches what comes at once
            return list(pool.map(lambda folder: self._again(lambda: ask(folder)), folders))

    def _unload(self, name: str) -> None:
        with contextlib.suppress(RequestError, EngineLostError):
            self._asked("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def _asked(self, verb: str, path: str, body: Any) -> Any:
        seconds = SECONDS_TO_CONNECT, SECONDS_OF_AN_ANSWER
        try:
            with requests.Session() as session:
                session.trust_env = False  # no proxy, and no key of another place
                answer = session.request(verb, self._address + path, json=body, headers=self._headers, timeout=seconds)
        except requests.RequestException as error:
            raise EngineLostError(
                f"model.engine: the server at {self._address} does not answer ({type(error).__name__}); start it, or "
                "give another address."
            ) from None
        too_large = RANK_LIMIT in answer.text  # told as a failure of the server's, and no less final
        if (answer.status_code >= 500 and not too_large) or (answer.status_code == 404 and path == "/v1/completions"):
            raise _FailedError(f"model.engine: the server at {self._address} fails: {_said(answer)}")
        if answer.status_code == 404 and "lora" in path:
            raise RequestError(
                f"model.engine: the server at {self._address} takes no adapters while it runs; start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora."
            )
        if answer.status_code >= 400:
            raise RequestError(f"model.engine: the server at {self._address} refuses: {_said(answer)}")
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return None
        try:
            return answer.json()
        except requests.JSONDecodeError:
            raise self._no_vllm() from None

    def _no_vllm(self) -> RequestError:
        return RequestError(f"model.engine: what answers at {self._address} is no server of vLLM; give its address.")


class _FailedError(EngineLostError):
    """The server answers that it failed, as it does while it is being ended, and where it was asked too much."""


def _said(answer: requests.Response) -> str:
    """Returns the first sentence of an answer that is an error, with the way out where it is known."""
    try:
        text = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    text = " ".join(text.split()).partition(". ")[0].rstrip(".")
    lower = "; start it with a larger --max-lora-rank, or lower method.rank and method.frozen_rank"
    way_out = lower if RANK_LIMIT in text else ""
    return (text if len(text) <= 300 else f"{text[:300]} ...") + f"{way_out}."


def _answer_of(prompt: Prompt, choice: Any) -> Answer:
    if not prompt.wanted:
        return Answer(
            {
                i: {int(token): (own["logprob"], own["rank"]) for token, own in entry.items()}
                for i, entry in enumerate(choice["prompt_logprobs"])
                if entry
            }
        )
    said = choice["logprobs"]
    (greedy,), (value,), (top,) = said["tokens"], said["token_logprobs"], said["top_logprobs"]

    def number(token: str) -> int:
        return int(token.removeprefix("token_id:"))

    table = {number(token): (float(own), 2) for token, own in top.items()}
    return Answer({len(prompt.tokens): table | {number(greedy): (float(value), 1)}})
