"""An OpenAI-compatible server on 127.0.0.1, for programs that ask a model of a run by its name.

Calls come side by side, in the thread of the server. The thread that opened the names answers them: it takes all calls
that wait for one model, and computes them in one batch. So the weights are those of the name while a call is answered.
Where an engine that is a server writes, each call is passed on by itself, side by side with the others.
"""

import asyncio
import json
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tezo.forward.engine import Continuing, EngineRefusesError, Named, Writer
from tezo.system.digests import hash_of
from tezo.system.errors import RequestError
from tezo.tasks.generation import LEARNT, Sampling, Turn, to_the_end, written_together
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.ends import text_after
from tezo.tasks.openai_form import Refused, Request, Written, answer_to, models_as, no_such_model, request_of

T = TypeVar("T")

HOST = "127.0.0.1"
SECONDS_TO_GATHER = 0.01
"""How long the first call waits for others that could be answered in the same batch."""
MOST_TOGETHER = 128
"""Answers that are written in one batch."""
SECONDS_TO_START, SECONDS_TO_END = 30.0, 1
SECONDS_OPEN = 3600
"""How long a connection without a call stays open."""
HUNG_UP = "The program has hung up."
NEEDS = "train.serve needs a server, which is not installed: pip install 'tezo[serve]'."


@dataclass
class Call:
    """A request that waits for its answer, which is JSON."""

    request: Request
    answer: "Future[dict[str, Any]]" = field(default_factory=Future)

    def end(self, error: Refused) -> None:
        """Refuses it, unless it has an answer."""
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


@dataclass(frozen=True)
class _Task:
    """One answer that is to be written.

    Attributes:
        prompt: tokens.
        most: tokens of the answer.
        stops: texts before which it ends.
        sampling: None: greedy.
        row: names its random numbers, beside what `sampling` says.
    """

    prompt: Sequence[int]
    most: int
    stops: Sequence[str]
    sampling: Sampling | None
    row: int


def check_free(port: int) -> None:
    """Raises a `RequestError` where no server can be opened at a port of this machine; 0: any."""
    check_installed()
    _bound(port).close()


def check_installed() -> None:
    """Raises a `RequestError` where the server's packages are missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise RequestError(NEEDS) from None


def _bound(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((HOST, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"train.serve_port is {port}, which cannot be opened on {HOST} ({reason}); give another, or leave it out."
        ) from None
    return found


class OwnServer:
    """A server of models by name.

    Args:
        port: of this machine; 0: any that is free.
        most: tokens of an answer where a call does not say.
        temperature: of sampling where a call does not say; 0: greedy.
        seed: of sampling, of calls that give none.
    """

    def __init__(self, port: int, most: int, temperature: float, seed: int) -> None:
        self._port, self._most, self._temperature, self._seed = port, most, temperature, seed
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._names: Sequence[str] = ()
        self._lock = threading.Lock()
        self._own, self._given, self._answered = secrets.token_hex(4), 0, 0
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def serve(
        self, model: Any, objective: CausalObjective, writers: Sequence[Writer], step: int, ask: Callable[[Named], T]
    ) -> list[T]:
        """Returns the value of `ask` for each model, which has a name meanwhile. Calls of it run side by side.

        Args:
            model: the model, whose class says which prompts go into one batch.
            objective: its tokenizer, and the ends of its answers.
            writers: what each model writes with.
            step: whose random numbers calls sample with that give no seed.
            ask: it may send requests until it returns.

        Raises:
            RequestError: the server cannot be started, or a model cannot write.
        """
        named = self._new_names(len(writers))
        of_names = {each.model: writer for each, writer in zip(named, writers, strict=True)}
        return self._open(_Desk(self, model, objective, step), of_names, [partial(ask, each) for each in named])

    def roll_out(
        self,
        model: Any,
        objective: CausalObjective,
        writer: Writer,
        step: int,
        first: int,
        count: int,
        ask: Callable[[Sequence[Named]], T],
        *,
        apart: bool = False,
    ) -> tuple[T, list[list[Turn]]]:
        """Returns the value of `ask` for so many names of one model, and the turns that were written under each.

        All answers are sampled at `LEARNT`, with random numbers of the name. The temperature and the seed of a call do
        not count.

        Args:
            model: see `serve`.
            objective: likewise.
            writer: what the model writes with.
            step: whose random numbers calls sample with.
            first: number of the first name, by which random numbers differ.
            count: number of names.
            ask: it may send requests until it returns.
            apart: whether `writer` takes calls in several threads, and each call by itself.
        """
        named = self._new_names(count)
        desk = _Desk(self, model, objective, step, {each.model: first + i for i, each in enumerate(named)})
        (found,) = self._open(desk, dict.fromkeys(desk.numbers, writer), [partial(ask, named)], apart=apart)
        return found, [desk.turns[each.model] for each in named]

    def _new_names(self, count: int) -> list[Named]:
        address = self._started()
        names = [Named(f"{address}/v1", f"tezo-{self._own}-{self._given + i}") for i in range(count)]
        self._given += count
        return names

    def _open(
        self, desk: "_Desk", writers: Mapping[str, Writer], asks: Sequence[Callable[[], T]], *, apart: bool = False
    ) -> list[T]:
        """Returns the values of functions during which models have these names."""
        threads = ThreadPoolExecutor(len(asks))
        asked: list[Future[T]] = []
        try:
            with self._lock:
                self._names = [*writers]
            for ask in asks:
                asked.append(threads.submit(ask))
                asked[-1].add_done_callback(lambda _: self._calls.put(None))
            (self._answer_apart if apart else self._answer)(desk, writers, asked)
        finally:
            with self._lock:
                self._names = ()
            for call in self._waiting():
                call.end(no_such_model(call.request.model))
            threads.shutdown(wait=False, cancel_futures=True)
        return [each.result() for each in asked]

    def _answer(self, desk: "_Desk", writers: Mapping[str, Writer], asked: "Sequence[Future[T]]") -> None:
        """Answers calls until all that was asked has its value."""
        waiting: list[Call] = []
        while not all(each.done() for each in asked):
            if not waiting:
                first = self._calls.get()
                if first is None:
                    continue
                time.sleep(SECONDS_TO_GATHER)
                waiting.append(first)
            waiting += self._waiting()
            writer = writers[waiting[0].request.model]
            batch = [call for call in waiting if writers[call.request.model] is writer]
            waiting = [call for call in waiting if writers[call.request.model] is not writer]
            try:
                desk.answer(writer, batch)
            except BaseException as error:
                for call in (*batch, *waiting):
                    call.end(ended_by(error))
                raise
        for call in waiting:
            call.end(no_such_model(call.request.model))

    def _answer_apart(self, desk: "_Desk", writers: Mapping[str, Writer], asked: "Sequence[Future[T]]") -> None:
        """Answers each call by itself, side by side with the others, until all that was asked has its value."""

        def answer(call: Call) -> None:
            try:
                desk.answer(writers[call.request.model], [call])
            except EngineRefusesError as error:  # this call alone, of which the program is told
                call.end(Refused(str(error)))
            except BaseException as error:
                call.end(ended_by(error))
                raise

        with ThreadPoolExecutor(MOST_TOGETHER) as threads:
            running: list[Future[None]] = []
            while not all(each.done() for each in asked):
                call = self._calls.get()
                if call is not None:
                    running.append(threads.submit(answer, call))
                    running[-1].add_done_callback(lambda _: self._calls.put(None))
                for each in [each for each in running if each.done()]:
                    running.remove(each)
                    each.result()  # raises what ends the run

    def _waiting(self) -> list[Call]:
        """Takes the calls that wait."""
        found = []
        with suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    found.append(call)
        return found

    def task(self, request: Request, prompt: Sequence[int], row: int, step: int, *, learns: bool) -> _Task:
        """Returns the answer that is to be written to one prompt, with what the request does not say.

        `learns`: whether it is learnt from, and so sampled at `LEARNT`, by no seed of the request.
        """
        temperature = self._temperature if request.temperature is None else request.temperature
        sampling = None
        if learns:
            sampling = Sampling(LEARNT, self._seed, step)
        elif temperature:
            seed, own = (self._seed, step) if request.seed is None else (request.seed & (2**63 - 1), 0)
            sampling = Sampling(temperature, seed, own)
        return _Task(prompt, self._most if request.most is None else request.most, request.stops, sampling, row)

    def number(self) -> str:
        """Returns the number of the next answer."""
        self._answered += 1
        return f"{self._own}-{self._answered}"

    def close(self) -> None:
        """Ends the server."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
            self._thread = None

    def _started(self) -> str:
        """Returns the address of the server, which runs from the first call on."""
        if self._thread is None:
            check_installed()
            import uvicorn

            bound = _bound(self._port)
            self._port = bound.getsockname()[1]
            config = uvicorn.Config(
                self._app(), log_config=None, access_log=False, lifespan="off", ws="none", http="h11", loop="asyncio",
                timeout_graceful_shutdown=SECONDS_TO_END, timeout_keep_alive=SECONDS_OPEN,
            )  # fmt: skip
            self._server = uvicorn.Server(config)
            self._thread = threading.Thread(target=self._run, args=(bound,), daemon=True)
            self._thread.start()
            begun = time.monotonic()
            while not self._server.started:
                if not self._thread.is_alive() or time.monotonic() - begun > SECONDS_TO_START:
                    raise RequestError(f"train.serve: the server at {HOST}:{self._port} does not start.")
                time.sleep(0.01)
        return f"http://{HOST}:{self._port}"

    def _run(self, bound: socket.socket) -> None:
        with bound:
            self._server.run(sockets=[bound])

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        def refused(error: Refused) -> Any:
            return JSONResponse(error.body, error.status)

        async def models(_: Any) -> Any:
            return JSONResponse(models_as(self._names, int(time.time())))

        async def answered(request: Any) -> Any:
            try:
                call = self._called(await request.body(), chat="/chat/" in request.url.path)
                return JSONResponse(await answer_of(call, request.receive))
            except Refused as error:
                return refused(error)
            except ClientDisconnect:
                return refused(Refused(HUNG_UP, status=499))

        async def elsewhere(_: Any, error: HTTPException) -> Any:
            return refused(Refused(f"{error.detail}.", status=error.status_code))

        return Starlette(
            routes=[
                Route("/v1/models", models),
                Route("/v1/completions", answered, methods=["POST"]),
                Route("/v1/chat/completions", answered, methods=["POST"]),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
            exception_handlers={HTTPException: elsewhere},
        )

    def _called(self, data: bytes, *, chat: bool) -> Call:
        """Returns a call with this body, which waits from now on.

        Raises:
            Refused: the body is not a request of OpenAI's form, or names a model that does not exist.
        """
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise Refused("The body is not JSON.") from None
        call = Call(request_of(body, chat=chat))
        with self._lock:  # what comes after the names are gone is not answered by anybody
            if call.request.model not in self._names:
                raise no_such_model(call.request.model)
            self._calls.put(call)
        return call


def ended_by(error: BaseException) -> Refused:
    """Returns the answer to calls that an error of the run leaves without one."""
    return Refused(f"The run has ended ({type(error).__name__}).", status=500)


async def answer_of(call: Call, receive: Callable[[], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    """Returns the answer to a call, which is withdrawn where the program hangs up before.

    An answer that is there at that moment stands.

    Args:
        call: the call.
        receive: that of ASGI; behind the body of a request it returns when the program hangs up.

    Raises:
        Refused: the call is refused, or the program has hung up.
    """
    answer, hung_up = asyncio.wrap_future(call.answer), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({answer, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Refused(HUNG_UP, status=499)
        return answer.result()
    finally:
        answer.cancel()  # and with it the call, where it has no answer
        hung_up.cancel()


class _Desk:
    """What answers the calls for the models of one step.

    Args:
        server: what fills in what a request does not say.
        model: see `OwnServer.serve`.
        objective: likewise.
        step: likewise.
        numbers: name -> its number, where answers are learnt from.

    Attributes:
        turns: name of `numbers` -> what was written under it.
    """

    def __init__(
        self,
        server: OwnServer,
        model: Any,
        objective: CausalObjective,
        step: int,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        self._server, self._model, self._objective, self._step = server, model, objective, step
        self._alone = threading.Lock()  # of all but writing: tokenizers are not for several threads
        self._times: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.numbers = numbers or {}
        self.turns: dict[str, list[Turn]] = {name: [] for name in self.numbers}

    def answer(self, writer: Writer, calls: Sequence[Call]) -> None:
        """Answers calls for one model."""
        taken: list[tuple[Call, list[_Task]]] = []
        for call in calls:
            if call.answer.cancelled():
                continue
            try:
                with self._alone:
                    taken.append((call, self._tasks(call.request)))
            except Refused as error:
                call.end(error)
        written = iter(self._written(writer, [task for _, tasks in taken for task in tasks]))
        for call, tasks in taken:
            found = [next(written) for _ in tasks]
            answers = [answer for answer, _ in found]
            asked = sum(len(task.prompt) for task in tasks[:: call.request.count])
            with self._alone, suppress(InvalidStateError):  # the program has hung up meanwhile
                call.answer.set_result(answer_to(call.request, self._server.number(), int(time.time()), asked, answers))
                if self.numbers:
                    turns = [(tuple(t.prompt), tuple(tokens)) for t, (_, tokens) in zip(tasks, found, strict=True)]
                    self.turns[call.request.model] += turns

    def _tasks(self, request: Request) -> list[_Task]:
        found = []
        for prompt in self._prompts(request):
            for i in range(request.count):
                row = self._row(request, prompt, i)
                found.append(self._server.task(request, prompt, row, self._step, learns=bool(self.numbers)))
        context = self._objective.context
        for task in found:
            if len(task.prompt) + task.most > context:
                raise Refused(
                    f"This model's maximum context length is {context} tokens, and {len(task.prompt)} tokens of the "
                    f"prompt with {task.most} of the answer are more; shorten the prompt, or lower max_tokens.",
                    "max_tokens",
                    code="context_length_exceeded",
                )
        return found

    def _row(self, request: Request, prompt: Sequence[int], place: int) -> int:
        """Returns a number of the random numbers of the answer at `place` to a prompt, the same for all models.

        A model that is asked the same again has others, unless the request has a seed; a call that was withdrawn
        before it was looked at does not count. Names whose answers are learnt from have each its own.
        """
        own = (self.numbers[request.model],) if self.numbers else ()
        if request.seed is None or own:
            key = request.model, tuple(prompt)
            self._times[key] += 1
            place = self._times[key]
        return int(hash_of((tuple(prompt), place, *own)), 16)

    def _prompts(self, request: Request) -> list[list[int]]:
        objective = self._objective
        if request.messages is not None:
            if objective.tokenizer.chat_template is None:
                raise Refused("This model has no chat template; ask /v1/completions.", "messages")
            try:
                text = objective.tokenizer.apply_chat_template(
                    [dict(message) for message in request.messages], tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # whatever the template raises
                raise Refused(f"The chat template refuses the messages ({error}).", "messages") from None
            return [objective.prompt_tokens(str(text), chat=True)]
        found = [
            objective.prompt_tokens(prompt, chat=False) if isinstance(prompt, str) else [*prompt]
            for prompt in request.prompts
        ]
        for prompt in found:
            if not prompt or max(prompt) >= len(objective.tokenizer):
                raise Refused("The prompt is empty, or has a token that the model does not have.", "prompt")
        return found

    def _written(self, writer: Writer, tasks: Sequence[_Task]) -> list[tuple[Written, Sequence[int]]]:
        """Returns the answer of each task, and its tokens."""
        found: dict[int, tuple[Written, Sequence[int]]] = {}
        for places in written_together(self._model, [task.prompt for task in tasks]):
            for start in range(0, len(places), MOST_TOGETHER):
                part = places[start : start + MOST_TOGETHER]
                of_part = [tasks[i] for i in part]
                written = writer([task.prompt for task in of_part], self._continuing(of_part))
                with self._alone:
                    for i, task, tokens in zip(part, of_part, written, strict=True):
                        answer = self._ended(task, tokens)
                        found[i] = answer, tokens[: answer.tokens]
        return [found[i] for i in range(len(tasks))]

    def _continuing(self, tasks: Sequence[_Task]) -> Continuing:
        def noisy(logits: Tensor, rows: Sequence[int], place: int) -> Tensor:
            own = []
            for values_V, row in zip(logits, rows, strict=True):
                sampling, number = tasks[row].sampling, tasks[row].row
                plain = values_V.float().unsqueeze(0)
                own.append(plain if sampling is None else sampling.noisy(plain, [number], place))
            return torch.cat(own)

        def ended(row: int, tokens: Sequence[int]) -> bool:
            task = tasks[row]
            return len(tokens) >= task.most or self._stop_in(task, tokens) is not None

        sampled = any(task.sampling is not None for task in tasks)
        differ = len({task.most for task in tasks}) > 1 or any(task.stops for task in tasks)
        return Continuing(
            max(task.most for task in tasks),
            sorted(self._objective.ends.marks),
            False,
            noisy=noisy if sampled else None,
            # an engine that draws random numbers itself writes answers that are learnt from, and no others
            temperature=LEARNT if self.numbers else 0.0,
            seeds=[task.sampling.seed_of(task.row) for task in tasks if task.sampling and self.numbers],
            ended=ended if differ else None,
        )

    def _text(self, task: _Task, tokens: Sequence[int]) -> str:
        return text_after(self._objective.tokenizer, task.prompt, tokens, special=False)

    def _stop_in(self, task: _Task, tokens: Sequence[int]) -> int | None:
        """Returns the place of the first stop in the text of tokens; None: there is none."""
        text = self._text(task, tokens) if task.stops else ""
        return min((place for stop in task.stops if (place := text.find(stop)) >= 0), default=None)

    def _ended(self, task: _Task, tokens: Sequence[int]) -> Written:
        marks = self._objective.ends.marks
        tokens = to_the_end(tokens[: task.most], marks)
        for count in range(1, len(tokens) + 1) if task.stops else ():
            stop = self._stop_in(task, tokens[:count])
            if stop is not None:
                return Written(self._text(task, tokens[:count])[:stop], count, False)
        is_ended = bool(tokens) and tokens[-1] in marks
        return Written(self._text(task, tokens[: len(tokens) - is_ended]), len(tokens), not is_ended)
