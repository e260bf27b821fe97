"""Several engines of one kind that share the changes of a call: servers, or actors of Ray.

Changes are independent, so an engine that is lost has its change computed again by another, and one that comes back is
used again. All compute the same numbers, so results do not depend on who computed what.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tezo.forward.answers import MalformedError, check_continued, check_told, once_more
from tezo.forward.engine import Asked, Change, Continuing, Engine, EngineLostError, Served, Told, Watch, Watched
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError

T = TypeVar("T")

CLUSTER = "RAY_ADDRESS"
"""Variable of the environment: where the cluster of Ray is."""
SECONDS_TO_CONNECT = 5.0
SECONDS_ASIDE = 5.0
"""For how long an engine that was lost is left alone."""
MOST_LOSSES = 10
"""Times that one change may be lost."""


class Workers(Engine):
    """Engines that compute side by side.

    Args:
        engines: of one kind, on one model.
        looks: an engine on the same model that looks into layers; None: the first one does.
    """

    def __init__(self, engines: Sequence[Engine], looks: Engine | None = None) -> None:
        self._engines, self._looks = engines, looks or engines[0]
        self.name = f"{len(engines)} x {engines[0].name}" if len(engines) > 1 else engines[0].name
        self.at_once = sum(engine.at_once for engine in engines)
        self.serves = engines[0].serves

    def changes(self, module: str) -> bool:
        return self._engines[0].changes(module)

    def reserve(self, rank: int, modules: Sequence[str] = ()) -> list[str]:
        every = dict.fromkeys([*self._engines, self._looks])
        return [said for engine in every for said in engine.reserve(rank, modules)]

    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        return self._shared_out(changes, lambda engine, change: engine.log_probs([change], asked)[0])

    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        return self._shared_out(changes, lambda engine, change: engine.generate([change], prompts, wanted)[0])

    def serve(self, changes: Sequence[Change], ask: Callable[[Served], T]) -> list[T]:
        return self._shared_out(changes, lambda engine, change: engine.serve([change], ask)[0])

    def _shared_out(self, changes: Sequence[Change], compute: Callable[[Engine, Change], T]) -> list[T]:
        """Returns what engines compute for each change; one that is lost has its change computed by another."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(changes)):
            waiting.put(number)
        found: dict[int, T] = {}
        failures: list[BaseException] = []
        losses = [0] * len(changes)

        def work(engine: Engine) -> None:
            while len(found) < len(changes) and not failures:
                try:
                    number = waiting.get(timeout=0.05)
                except queue.Empty:  # another may still lose its own
                    continue
                try:
                    found[number] = compute(engine, changes[number])
                except EngineLostError as error:
                    losses[number] += 1
                    waiting.put(number)
                    if losses[number] > MOST_LOSSES:
                        failures.append(error)
                    time.sleep(SECONDS_ASIDE)
                except BaseException as error:  # it is raised below, in the caller's thread
                    failures.append(error)

        threads = [
            threading.Thread(target=work, args=(engine,), daemon=True)
            for engine in self._engines
            for _ in range(engine.at_once)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and len(found) < len(changes) and not failures:
                thread.join(0.05)
        if failures:
            raise failures[0]
        return [found[number] for number in range(len(changes))]

    def check_changes(self) -> None:
        for engine in self._engines:
            engine.check_changes()

    def hidden(self, change: Change, texts: Sequence[Sequence[int]]) -> Any:
        return self._looks.hidden(change, texts)

    def watches(self, module: str) -> bool:
        return self._looks.watches(module)

    @property
    def watches_some(self) -> bool:
        return self._looks.watches_some

    def watch(self, change: Change, asked: Asked, watch: Watch) -> Watched:
        return self._looks.watch(change, asked, watch)

    def head_rows(self, rows_X: Tensor) -> tuple[Tensor, Tensor]:
        return self._looks.head_rows(rows_X)

    def product(self, layer: str, x: Tensor, transposed: bool) -> Tensor:
        return self._looks.product(layer, x, transposed)

    def save_beside(self, *arguments: Any) -> str | None:
        return self._engines[0].save_beside(*arguments)


class Holder:
    """What an actor of Ray holds: an engine of its own.

    Args:
        config: the section `model`, without workers.
        load: what loads a model for its engine.
        threads: number of threads of the actor.
    """

    def __init__(self, config: ModelConfig, load: Callable[[ModelConfig], LoadedModel], threads: int) -> None:
        torch.set_num_threads(threads)
        engine = load(config).engine
        assert engine is not None
        self._engine = engine

    def call(self, rank: int, name: str, *arguments: Any) -> Any:
        """Calls a method of the engine, with room for changes of this rank."""
        self._engine.reserve(rank)
        return getattr(self._engine, name)(*arguments)

    def process(self) -> int:
        """Returns the number of the actor's process."""
        return os.getpid()


class InRay(Engine):
    """An engine in an actor of Ray, which Ray starts again where it dies.

    Args:
        actor: of `Holder`.
        like: an engine of the same kind in this process, for what is not computed.
    """

    def __init__(self, actor: Any, like: Engine) -> None:
        self._actor, self._like, self._rank = actor, like, 0
        self.name = f"{like.name} in Ray"

    def changes(self, module: str) -> bool:
        return self._like.changes(module)

    def reserve(self, rank: int, modules: Sequence[str] = ()) -> list[str]:
        del modules
        self._rank = rank  # with each call, for an actor that is started again knows nothing
        return []

    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        def check(found: list[Told]) -> None:
            check_told(found, len(changes), asked)

        return self._checked(check, "log_probs", changes, asked)

    def hidden(self, change: Change, texts: Sequence[Sequence[int]]) -> Any:
        def check(found: Tensor) -> None:
            if len(found) != len(texts):
                raise MalformedError(f"inputs of the head of {len(found)} texts in place of {len(texts)}")

        return self._checked(check, "hidden", change, texts)

    def watches(self, module: str) -> bool:
        return self._like.watches(module)

    @property
    def watches_some(self) -> bool:
        return self._like.watches_some

    def watch(self, change: Change, asked: Asked, watch: Watch) -> Watched:
        found: Watched = self._called("watch", change, asked, watch)
        return found

    def head_rows(self, rows_X: Tensor) -> tuple[Tensor, Tensor]:
        return self._like.head_rows(rows_X)

    def product(self, layer: str, x: Tensor, transposed: bool) -> Tensor:
        return self._like.product(layer, x, transposed)

    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        def check(found: list[list[list[int]]]) -> None:
            check_continued(found, len(changes), len(prompts))

        return self._checked(check, "generate", changes, prompts, wanted)

    def save_beside(self, *arguments: Any) -> str | None:
        return self._like.save_beside(*arguments)

    def _checked(self, check: Callable[[T], None], name: str, *arguments: Any) -> T:
        def ask() -> T:
            found: T = self._called(name, *arguments)
            check(found)
            return found

        way_out = "check that tezo and its engine have the same versions on all machines"
        return once_more(ask, "model.workers: an actor of Ray returned", way_out)

    def _called(self, name: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(self._actor.call.remote(self._rank, name, *arguments))
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, RequestError) else error from None
        except ray.exceptions.RayError as error:
            raise EngineLostError(f"model.workers: an actor of Ray is lost ({type(error).__name__}).") from None


def check_cluster() -> None:
    """Checks that something answers at the address in RAY_ADDRESS, which Ray itself waits for.

    Raises:
        RequestError: nothing does.
    """
    address = os.environ.get(CLUSTER, "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # none, or a word that Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"model.workers: {CLUSTER} is {address}, where nothing answers ({type(error).__name__}); start Ray there, "
            f"or leave {CLUSTER} out."
        ) from None


def load_in_ray(config: ModelConfig, load: Callable[[ModelConfig], LoadedModel]) -> LoadedModel:
    """Loads a model for an engine in as many actors of Ray as `model.workers` says.

    Raises:
        RequestError: Ray is missing, does not answer, or has not so many processors.
    """
    try:
        import ray
    except ImportError:
        raise RequestError(f"model.workers is {config.workers}, which needs Ray: pip install 'tezo[ray]'.") from None
    if not ray.is_initialized():
        check_cluster()
        try:
            ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
        except (ConnectionError, ValueError) as error:
            raise RequestError(
                f"model.workers is {config.workers}, and Ray does not start ({error}); see {CLUSTER}."
            ) from None
    available = int(ray.cluster_resources().get("CPU", 0))
    if config.workers > available:
        raise RequestError(f"model.workers is {config.workers}, and Ray has {available} processors; lower it.")
    alone = replace(config, workers=0)
    loaded = load(alone)
    assert loaded.engine is not None
    threads = max(1, available // config.workers) if available else torch.get_num_threads()
    remote = ray.remote(num_cpus=1, max_restarts=-1)(Holder)
    actors = [remote.remote(alone, load, threads) for _ in range(config.workers)]
    return replace(loaded, engine=Workers([InRay(actor, loaded.engine) for actor in actors]))
