"""A server of vLLM that the user has started, as an engine: changes are adapters that it loads while it runs.

A text is a prompt. Log-probabilities of its tokens come with the prompt; those of other tokens at a place are asked for
by a prompt that ends there. A change of the weights is a LoRA adapter in PEFT's format with a name that was never used
before: what vLLM has cached of prompts under an earlier adapter is of no other change.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tezo.engines.client import FOLDER, Client, FailedError
from tezo.engines.connection import shown
from tezo.engines.looks import Looks, Text
from tezo.engines.prompts import Answer, Prompt, prompts_of, told_of
from tezo.engines.second_copy import TEXT, SecondCopy, by_kind, compared, left_out, random_change
from tezo.engines.states import ends_of_blocks, placed, tried_layer
from tezo.engines.workers import Workers
from tezo.forward.engine import (
    HEAD,
    Asked,
    Change,
    Continuing,
    Engine,
    EngineLostError,
    Served,
    Told,
    Watch,
    Watched,
)
from tezo.models.in_file import load_folder
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.models.lora import Adapter, save_adapter
from tezo.system.errors import RequestError
from tezo.system.progress import CHECKING, current

logger = logging.getLogger(__name__)

SECONDS_OF_A_RESTART, FIRST_WAIT = 300.0, 0.5
"""For how long a server that does not answer is asked again, and the first wait; each is twice the one before."""
MOST_FAILURES = 2
"""Times that a server may answer that it failed before it is believed."""
PROBE = "The answer, 42 times: naïve."
"""A text that tokenizers split in different ways."""
T = TypeVar("T")
AT_ONCE = 8
"""Changes that are computed side by side; vLLM puts as many of them into a batch as its max_loras allows."""
SECONDS_OF_THE_FIRST = 10.0
"""For how long the first states are waited for, which may be on another machine."""
PROMPTS_OF_STATES, TOKENS_OF_STATES = 64, 8192
"""Prompts of a request, and their tokens, at most, where each has a file of states."""
STATES_AT_ONCE = 32
"""Prompts whose states are asked for side by side."""
LEAST_ROOM, MOST_ROOM = 8, 256
"""Rank of the adapters that find the layers whose inputs can be read, and of those that read, at most."""
OWN = f"tezo-{socket.gethostname()}-"
"""What names of adapters of this machine begin with, before the number of the process."""
MOST_DIGITS = 10
"""Digits of the largest number of a process."""


def is_left(name: str) -> bool:
    """Returns whether an adapter or its folder is of a process of this machine that is gone."""
    process = name.removeprefix(OWN).partition("-")[0]
    is_number = process.isascii() and process.isdigit() and len(process) <= MOST_DIGITS
    return name.startswith(OWN) and is_number and not Path(f"/proc/{process}").exists()


def load_server(config: ModelConfig) -> LoadedModel:
    """Uses a server of vLLM, with runtime LoRA updating, for the passes of a model; several with commas between.

    Those that show states are for looks alone, where there are others.

    Raises:
        RequestError: a server does not answer as vLLM does, has another model, or ignores adapters.
    """
    clients = [Client(address.strip()) for address in config.engine.split(",")]
    for client in clients:
        again(client.models)  # one that is not there is named before the model is read
    loaded, _ = load_folder(config.name)
    copy = SecondCopy(loaded.model, loaded.unread)
    servers = [Server(client, loaded.model, loaded.tokenizer, copy) for client in clients]
    looks = next((server for server in servers if server.shows_states), None)
    passes = [server for server in servers if not server.shows_states] or servers
    return replace(loaded, engine=passes[0] if servers == [*passes[:1]] else Workers(passes, looks))


def again(
    ask: Callable[[], T], seconds: float = 0.0, notice: Callable[[EngineLostError], object] = lambda _: None
) -> T:
    """Returns what a server answers, which is asked again where it fails or is gone.

    Args:
        ask: returns it.
        seconds: for how long a server that is gone is asked again; once more in any case.
        notice: is told each time.

    Raises:
        EngineLostError: it has failed `MOST_FAILURES` times more, or is gone.
    """
    begun, wait, times, failures = time.monotonic(), FIRST_WAIT, 0, 0
    while True:
        try:
            return ask()
        except FailedError as error:
            failures += 1
            if failures > MOST_FAILURES:
                raise
            notice(error)
        except EngineLostError as error:
            times += 1
            if times > 1 and time.monotonic() - begun > seconds:
                raise
            notice(error)
        time.sleep(wait)
        wait = min(2 * wait, 10.0)


class Server(Engine):
    """A server of vLLM.

    Args:
        client: asks it.
        model: the modules of its model.
        tokenizer: of its model.
        copy: what its answers are compared with; None: nothing.
    """

    name = "a vLLM server"
    at_once = AT_ONCE
    serves = True
    _is_lost = False
    _saying = Lock()

    def __init__(self, client: Client, model: Any, tokenizer: Any, copy: SecondCopy | None = None) -> None:
        self._model, self._client, self._copy = model, client, copy
        self._checked: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        self._loaded: dict[str, Path] = {}
        shared = os.environ.get(FOLDER) or ("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
        self._shared = Path(shared)
        for folder in self._shared.glob(f"{OWN}*"):  # by a process that was killed
            if is_left(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        self._vocabulary = len(model.get_output_embeddings().weight)
        self._own = f"{OWN}{os.getpid()}-{secrets.token_hex(4)}"
        models = again(client.models)
        for left in (each.name for each in models if is_left(each.name)):
            self._unload(left)
        self._probe, self._text = (
            list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (PROBE, TEXT)
        )
        self._base = next(each.name for each in models if each.parent is None)
        self._check_same()
        self._said_files_stay = False
        self._states_file = again(lambda: self._client.states_file(self._base, self._text))
        self.check_changes()

    def changes(self, module: str) -> bool:
        return self._model.get_submodule(module) is not self._model.get_output_embeddings()

    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        prompts = prompts_of(asked, one_by_one=self.shows_states)
        if any(prompt.wanted for prompt in prompts) and asked.likely > 1:
            raise RequestError(f"{self.name} tells the likeliest tokens at places with one right token alone.")
        with contextlib.ExitStack() as files:
            folders = [files.enter_context(self._folder(change)) for change in changes]
            return [told_of(asked, prompts, answers) for answers in self._answers(prompts, folders, asked.likely)]

    @property
    def shows_states(self) -> bool:
        """Whether it writes states of prompts into files; vLLM 0.32 fails then where several tokens are asked for."""
        return self._states_file is not None

    @property
    def watches_some(self) -> bool:
        return self._looks is not None

    def watches(self, module: str) -> bool:
        return module != HEAD and self._looks is not None and module in self._looks.layers

    def watch(self, change: Change, asked: Asked, watch: Watch) -> Watched:
        if self._looks is None:
            return super().watch(change, asked, watch)
        return self._looks.watch(change, asked, watch)

    @cached_property
    def _looks(self) -> Looks | None:
        """Watches layers by the states that the server shows; None: it shows none, or none of a layer."""
        if self._states_file is None:
            return None
        folder = self._states_file.path.parent
        with current().phase(CHECKING):
            try:
                if not os.access(folder, os.R_OK | os.W_OK):
                    raise EngineLostError
                states = self._client.states(self._base, self._text, SECONDS_OF_THE_FIRST)
            except EngineLostError:
                logger.warning(
                    "The server at %s writes states into %s, whose files are not seen here or cannot be removed: looks "
                    "do not use them, and nobody removes them.", self._client.address, folder,
                )  # fmt: skip
                return None
            layers = ends_of_blocks(self._model, states.shape[-1])
            size = float(states[1:].square().mean().sqrt()) * states.shape[-1] ** 0.5
            tried = [tried_layer(name, layer, i, size) for i, (name, layer) in enumerate(layers.items())]
            part = slice(LEAST_ROOM)
            changes = [self._no_change(), *({each.name: each.adapter(part)} for each in tried)]
            before, *after = (self._states(change, [tuple(self._text)], lambda found: found)[0] for change in changes)
            found = [placed(each, part, before, under) for each, under in zip(tried, after, strict=True)]
            seen = [each for each in found if each is not None]
            if not seen:
                logger.warning(
                    "The server at %s shows states, and none of them stands behind the last layer of a block alone: "
                    "looks do not use them.", self._client.address,
                )  # fmt: skip
                return None
            return Looks(seen, self._room(), self._states, self.log_probs)

    def _room(self) -> int:
        """Returns a rank of which the server takes adapters: 256 at most, from 8 on by doubling."""
        rank = MOST_ROOM
        while rank > LEAST_ROOM:
            try:
                self.reserve(rank)
                break
            except EngineLostError:
                raise
            except RequestError:
                rank //= 2
        return rank

    def _states(self, change: Change, texts: Sequence[Text], keep: Callable[[Tensor], T]) -> list[T]:
        """Returns what is kept of the states of each text under a change."""

        def under(name: str) -> list[T]:
            with ThreadPoolExecutor(STATES_AT_ONCE) as threads:
                return list(threads.map(lambda text: keep(self._client.states(name, text)), texts))

        with self._folder(change) as folder:
            (found,) = self._under_each([folder], under)
        current().count(len(texts))
        return found

    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        with contextlib.ExitStack() as files:
            return self._continued(prompts, [files.enter_context(self._folder(change)) for change in changes], wanted)

    def serve(self, changes: Sequence[Change], ask: Callable[[Served], T]) -> list[T]:
        def asked(name: str) -> T:
            found = ask(Served(f"{self._client.address}/v1", name, partial(self._written, name)))
            if all(each.name != name for each in self._client.models()):  # what was asked meanwhile is of no use
                raise EngineLostError(f"model.engine: the server at {self._client.address} was started anew.")
            return found

        with self._saying:
            says, self._said_files_stay = not self._said_files_stay, True
        if self._states_file is not None and says:
            logger.warning(
                "The server at %s writes a file into %s for each prompt that a program asks, and nobody removes them; "
                "start it without --kv-transfer-config, or name a second server beside it, which programs then ask.",
                self._client.address, self._states_file.path.parent,
            )  # fmt: skip
        with contextlib.ExitStack() as files:
            return self._under_each([files.enter_context(self._folder(change)) for change in changes], asked)

    def _no_change(self, rank: int = 1) -> Change:
        (first, *_) = self._linear()
        return random_change(self._model, [first], 0.0, rank)

    def _linear(self) -> list[str]:
        """Returns the names of the linear layers that adapters may change."""
        return [n for n, m in self._model.named_modules() if isinstance(m, nn.Linear) and self.changes(n)]

    @contextmanager
    def _folder(self, change: Change) -> Iterator[Path]:
        """Yields a folder with a change as an adapter, which is removed at the end."""
        with tempfile.TemporaryDirectory(prefix=f"{OWN}{os.getpid()}-", dir=self._shared) as name:
            Path(name).chmod(0o755)  # a server may be of another user
            # vLLM 0.32 computes prompts without an adapter under those of others in the batch
            save_adapter(uniform(change or self._no_change()), Path(name), model=self._model, base="")
            yield Path(name)

    def _check_same(self) -> None:
        def tokens() -> list[int]:
            return self._client.tokens(self._base, PROBE, self._vocabulary)

        if all(again(tokens) != self._probe for _ in range(2)):
            raise RequestError(
                f"model.name: the server at {self._client.address} has {shown(self._base)}, whose tokenizer is another "
                "one; give the model that it has."
            )

    def check_changes(self) -> None:
        one_of_each = [names[0] for names in by_kind(self._linear()).values()]  # a server may leave out some
        large = random_change(self._model, one_of_each, 1.0)  # not rounded away in any data type
        if all(self._are_alike([self._no_change(), large]) for _ in range(2)):
            raise RequestError(
                f"model.engine: the server at {self._client.address} ignores adapters: under two different ones its "
                "log-probabilities are equal to the bit. Start it with --enable-lora, and give its address, not "
                "that of a program that answers in its place."
            )

    def _are_alike(self, changes: Sequence[Change]) -> bool:
        """Returns whether a text has the same log-probabilities under all changes."""
        with contextlib.ExitStack() as files:
            folders = [files.enter_context(self._folder(change)) for change in changes]
            every = {i: i for i in range(len(self._probe) - 1)}
            first, *others = self._answers([Prompt(self._probe, every)], folders, 1)
        return all(other == first for other in others)

    def reserve(self, rank: int, modules: Sequence[str] = ()) -> list[str]:
        with self._folder(self._no_change(rank)) as folder:
            self._again(lambda: self._tried(folder))
        asked = rank, tuple(modules)
        if modules and asked not in self._checked:
            with current().phase(CHECKING):
                self._check_parts(rank, modules)
                self._checked[asked] = self._compare(modules)
        return self._checked.get(asked, [])

    def _check_parts(self, rank: int, modules: Sequence[str]) -> None:
        """Raises a `RequestError` where the server leaves out adapters on some of these modules, or their last rank."""
        kinds, last = by_kind(modules), f"rank {rank}"
        changes = {kind: random_change(self._model, names, 1.0) for kind, names in kinds.items()}
        changes[last] = random_change(self._model, modules, 1.0, rank)
        out = [*changes]
        for _ in range(2):  # a second time what may have been one wrong answer
            none = [self._no_change()] * 2
            plain, asked_again, *under = self._text_under([*none, *(changes[name] for name in out)])
            out = left_out(plain, asked_again, dict(zip(out, under, strict=True)))
            if not out:
                return
        if out == [last]:
            raise RequestError(
                f"model.engine: the server at {self._client.address} takes an adapter of {last}, and computes without "
                f"its last one; start it with --max-lora-rank {rank} or more."
            )
        named = [name for name in out if name != last]
        raise RequestError(
            f"model.engine: the server at {self._client.address} takes adapters, and leaves {', '.join(named)} out: "
            "its log-probabilities are the same with and without. Start it with --lora-target-modules "
            f"{' '.join(kinds)}, or tune other layers (method.targets)."
        )

    def _compare(self, modules: Sequence[str]) -> list[str]:
        """Compares the server with a second copy; returns what is doubtful or could not be checked, for the user."""
        address, copy = self._client.address, self._copy
        why_not = "a second copy is missing" if copy is None else copy.why_not
        if copy is None or why_not is not None:
            return [
                f"model.engine: whether the server at {address} has the weights of model.name could not be checked: "
                f"torch would read the folder's, and {why_not}. That it computes adapters on every layer was."
            ]
        change, expected = copy.log_probs(self._text, modules)
        for attempt in range(2):
            told = torch.stack(self._text_under([self._no_change(), change]))
            found = compared(told, expected)
            if found.wrong is not None and attempt:
                raise RequestError(f"model.engine: the server at {address} {found.wrong}.")
            if found.wrong is None:
                break
        return [] if found.doubt is None else [f"model.engine: at {address} {found.doubt}"]

    def _text_under(self, changes: Sequence[Change]) -> list[Tensor]:
        """Returns the log-probabilities of the next tokens of a text under each change."""
        every = {i: i for i in range(len(self._text) - 1)}
        with contextlib.ExitStack() as files:
            folders = [files.enter_context(self._folder(change)) for change in changes]
            answers = self._answers([Prompt(self._text, every)], folders, 1)
        pairs = [*enumerate(self._text)][1:]
        return [torch.tensor([own.next[i][token][0] for i, token in pairs]) for (own,) in answers]

    def _tried(self, folder: Path) -> None:
        with self._adapter(folder):
            pass

    def _answers(self, prompts: Sequence[Prompt], folders: Sequence[Path], likely: int) -> list[list[Answer]]:
        return self._under_each(folders, lambda name: self._under(name, prompts, likely))

    def _continued(
        self, prompts: Sequence[Sequence[int]], folders: Sequence[Path], wanted: Continuing
    ) -> list[list[list[int]]]:
        client = self._client
        return self._under_each(folders, lambda name: client.continuations(name, prompts, wanted, self._vocabulary))

    def _written(self, name: str, prompts: Sequence[Sequence[int]], wanted: Continuing) -> list[list[int]]:
        """Returns the tokens that continue prompts under an adapter; a server that was started anew loads it again."""

        def ask() -> list[list[int]]:
            try:
                return self._client.continuations(name, prompts, wanted, self._vocabulary)
            except FailedError:
                with contextlib.suppress(RequestError):  # it may have it still
                    self._client.load(name, self._loaded[name])
                raise

        return self._again(ask)

    def _under_each(self, folders: Sequence[Path], ask: Callable[[str], T]) -> list[T]:
        """Returns what is answered under the adapter in each folder, which are asked at once: the server batches them.

        Args:
            folders: of adapters.
            ask: name of an adapter that is loaded -> what is answered under it.
        """

        def asked(folder: Path) -> T:
            with self._adapter(folder) as name:
                return ask(name)

        with ThreadPoolExecutor(len(folders)) as threads:
            return list(threads.map(lambda folder: self._again(lambda: asked(folder)), folders))

    def _under(self, name: str, prompts: Sequence[Prompt], likely: int) -> list[Answer]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, prompt in enumerate(prompts):
            groups.setdefault(prompt.wanted, []).append(i)
        found: dict[int, Answer] = {}
        for group in groups.values():
            for part in self._parts(group, prompts):
                answers = self._client.answers(name, [prompts[i] for i in part], likely, self._vocabulary)
                found |= dict(zip(part, answers, strict=True))
        return [found[i] for i in range(len(prompts))]

    def _parts(self, group: Sequence[int], prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Yields the prompts of each request: all of them, or fewer where each leaves a file until it is answered."""
        part: list[int] = []
        for i in group:
            tokens = sum(len(prompts[j].tokens) for j in [*part, i])
            if part and self.shows_states and (len(part) == PROMPTS_OF_STATES or tokens > TOKENS_OF_STATES):
                yield part
                part = []
            part.append(i)
        yield part

    def _again(self, ask: Callable[[], T]) -> T:
        """Returns what is answered: asked again where the server has been started anew, and has no adapter any more."""
        found = again(ask, SECONDS_OF_A_RESTART, self._say_lost)
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
            self._client.load(name, folder)
            self._loaded[name] = folder
            yield name
        finally:
            self._unload(name)
            self._loaded.pop(name, None)

    def _unload(self, name: str) -> None:
        with contextlib.suppress(RequestError, EngineLostError):
            self._client.unload(name)


def uniform(change: Change) -> Adapter:
    """Returns a change as an adapter of one rank."""
    rank = max(a_RI.shape[0] for a_RI, _ in change.values())
    pairs = {}
    for name, (a_RI, b_OR) in change.items():
        more = rank - a_RI.shape[0]
        pairs[name] = pad(a_RI, (0, 0, 0, more)), pad(b_OR, (0, more)).contiguous()
    return Adapter(rank, pairs)
