"""Many callers at once: an asyncio front, and one thread behind it that owns the engine.

Callers never touch the engine. They leave commands in an inbox, which the thread empties between two steps, and get what every step
brings through a queue of their event loop. So a request can be given up at any moment, from any loop, and nothing of it stays.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from paceline.engine.batch import AskedFor
from paceline.engine.engine import EngineStats
from paceline.engine.inputs import Messages, Params, Prompt, as_prompts, one_of
from paceline.engine.open import OpenedEngine, open_engine, settings_of
from paceline.errors import ConfigError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.params import SAMPLING_NAMES
from paceline.speculation.request import Request, RequestSpeculation
from paceline.spelling import suggest_arguments

log = logging.getLogger(__name__)

Speculation = RequestSpeculation | Mapping[str, object] | None
Result = TypeVar("Result")
News = tuple[Request, StreamChunk | Exception]


@dataclass(slots=True)
class _Listener:
    """Who wants to know about a request.

    Attributes:
        wants_chunks: after every step, or only when it has ended.
        num_seen: output tokens told of so far.
    """

    request: Request
    loop: asyncio.AbstractEventLoop
    news: "asyncio.Queue[News]"
    wants_chunks: bool
    num_seen: int = 0


class AsyncEngine:
    """A loaded target that serves many callers of any number of event loops at once.

    Example:
        >>> async with AsyncEngine.open("mini") as engine:
        ...     async for chunk in engine.stream("The quick brown"):
        ...         print(chunk.text, end="")

    Args:
        opened: from now on only this object's thread may use it.
    """

    def __init__(self, opened: OpenedEngine) -> None:
        self._opened = opened
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._inbox_lock = Lock()  # whatever asks for something comes before the command that ends the thread
        self._listeners: dict[int, _Listener] = {}  # by request; the thread's own
        self._is_closed = False
        self._is_ending = False
        self._thread = Thread(target=self._work, name="paceline-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, model: str = "mini", **options: Any) -> "AsyncEngine":
        """Load a model.

        Args:
            options: as for `LLM`.

        Raises:
            PacelineError: as for `LLM`.
        """
        return cls(open_engine(*settings_of(model, options)))

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def opened(self) -> OpenedEngine:
        """Tokenizer, settings and limits; its engine is the thread's."""
        return self._opened

    @suggest_arguments("generate", of_sampling=SAMPLING_NAMES)
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        prediction: object = None,
        namespace: str | None = None,
        speculation: Speculation = None,
        cache_salt: str | bytes | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, beside whatever else is running; arguments, order of the outputs and errors as for `LLM.generate`.

        Given up (cancelled), it frees everything. Closing the engine ends it with the finish reason "abort".
        """
        asked = AskedFor(prediction=prediction, namespace=namespace, speculation=speculation, cache_salt=cache_salt)
        maker = self._opened.maker
        return await self._collect(lambda: [maker.prompt_ids(one) for one in as_prompts(prompts)], one_of(params, sampling_params), asked)

    @suggest_arguments("chat", of_sampling=SAMPLING_NAMES)
    async def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        sampling_params: Params = None,
        prediction: object = None,
        namespace: str | None = None,
        speculation: Speculation = None,
        cache_salt: str | bytes | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, with `params.n` outputs; the rest as for `generate`."""
        asked = AskedFor(prediction=prediction, namespace=namespace, speculation=speculation, cache_salt=cache_salt)
        return await self._collect(lambda: [self._opened.maker.chat_ids(messages)], one_of(params, sampling_params), asked)

    @suggest_arguments("stream", of_sampling=SAMPLING_NAMES)
    def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        sampling_params: Params = None,
        prediction: object = None,
        namespace: str | None = None,
        speculation: Speculation = None,
        cache_salt: str | bytes | None = None,
    ) -> AsyncIterator[StreamChunk]:
        """Complete one prompt, yielding what every step adds; the last chunk of each sample carries the whole output.

        Left early (closed, cancelled, or collected as garbage), it frees everything.
        """
        asked = AskedFor(prediction=prediction, namespace=namespace, speculation=speculation, cache_salt=cache_salt)
        return self._stream(lambda: [self._opened.maker.prompt_ids(prompt)], one_of(params, sampling_params), asked)

    @suggest_arguments("stream_chat", of_sampling=SAMPLING_NAMES)
    def stream_chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        sampling_params: Params = None,
        prediction: object = None,
        namespace: str | None = None,
        speculation: Speculation = None,
        cache_salt: str | bytes | None = None,
    ) -> AsyncIterator[StreamChunk]:
        """Answer one conversation, yielding what every step adds; the rest as for `stream`."""
        asked = AskedFor(prediction=prediction, namespace=namespace, speculation=speculation, cache_salt=cache_salt)
        return self._stream(lambda: [self._opened.maker.chat_ids(messages)], one_of(params, sampling_params), asked)

    async def stats(self) -> EngineStats:
        """What the engine did so far, and who is in it."""
        return await self._call(lambda: self._opened.engine.stats)

    async def close(self) -> None:
        """End all requests with the finish reason "abort", free everything and end the thread; nothing happens the second time."""
        with self._inbox_lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(self._end)
        await asyncio.to_thread(self._thread.join)

    # The callers' side.

    async def _collect(self, prompts: Callable[[], list[list[int]]], params: Params, asked: AskedFor) -> list[RequestOutput]:
        requests = await self._make(prompts, params, asked, is_streamed=False)
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._follow(requests, wants_chunks=False)) as news:
            async for request, chunk in news:
                if chunk.output is not None:
                    outputs[id(request)] = chunk.output
        return [outputs[id(request)] for request in requests]

    async def _stream(self, prompts: Callable[[], list[list[int]]], params: Params, asked: AskedFor) -> AsyncIterator[StreamChunk]:
        requests = await self._make(prompts, params, asked, is_streamed=True)
        async with aclosing(self._follow(requests, wants_chunks=True)) as news:
            async for _, chunk in news:
                yield chunk

    async def _make(self, prompts: Callable[[], list[list[int]]], params: Params, asked: AskedFor, *, is_streamed: bool) -> list[Request]:
        """Tokenising and compiling take time: neither the event loop nor the engine's thread waits for them."""
        self._check_open()
        return await asyncio.to_thread(lambda: self._opened.requests(prompts(), params, asked, is_streamed=is_streamed))

    async def _follow(self, requests: Sequence[Request], *, wants_chunks: bool) -> AsyncGenerator[tuple[Request, StreamChunk], None]:
        """Run requests, yielding their news until all have ended; they are given up if this is left before."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[News]()
        listeners = [_Listener(request, loop, news, wants_chunks) for request in requests]
        self._ask(lambda: self._add(listeners))
        num_open = len(requests)
        try:
            while num_open:
                request, chunk = await news.get()
                if isinstance(chunk, Exception):
                    raise chunk
                num_open -= chunk.output is not None
                yield request, chunk
        finally:
            if num_open:
                self._inbox.put(lambda: self._drop(listeners))

    async def _call(self, ask: Callable[[], Result]) -> Result:
        """The answer of the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self._ask(lambda: _tell(loop, _set_result, answer, ask()))
        return await answer

    def _ask(self, command: Callable[[], object]) -> None:
        with self._inbox_lock:
            self._check_open()
            self._inbox.put(command)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the engine is closed: open another one")

    # The thread's side.

    def _work(self) -> None:
        engine = self._opened.engine
        while not self._is_ending:
            try:
                self._obey(is_idle=not engine.has_work)
                if engine.has_work:
                    engine.step()
            except Exception as error:  # not a request's own: those are caught below. Nobody may wait for ever, and the next ones may do
                log.exception("a step of the engine failed")
                self._fail_all(error)
            self._tell_all()
        for listener in list(self._listeners.values()):
            engine.abort(listener.request)
        self._tell_all()

    def _obey(self, *, is_idle: bool) -> None:
        """Do what is in the inbox; wait for something if there is nothing else to do."""
        try:
            command = self._inbox.get(block=is_idle)
            while True:
                command()
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _add(self, listeners: Sequence[_Listener]) -> None:
        engine = self._opened.engine
        try:
            for listener in listeners:
                engine.check(listener.request)
        except Exception as error:  # too large, or asks for what is not loaded: its caller's own
            _tell(listeners[0].loop, listeners[0].news.put_nowait, (listeners[0].request, error))
            return
        for listener in listeners:
            engine.add(listener.request)
            self._listeners[id(listener.request)] = listener

    def _drop(self, listeners: Sequence[_Listener]) -> None:
        """Give requests up that nobody waits for any more; nothing happens to those that have ended."""
        for listener in listeners:
            self._opened.engine.abort(listener.request)
            self._listeners.pop(id(listener.request), None)

    def _end(self) -> None:
        self._is_ending = True

    def _fail_all(self, error: Exception) -> None:
        for listener in self._listeners.values():
            if not listener.request.is_finished:
                listener.request.fail(error)
            self._opened.engine.abort(listener.request)

    def _tell_all(self) -> None:
        """Tell every listener what is new."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, StreamChunk | Exception]]] = {}
        for listener in list(self._listeners.values()):
            request = listener.request
            is_new = listener.wants_chunks and request.num_output_tokens > listener.num_seen
            if not (is_new or request.is_finished):
                continue
            by_loop.setdefault(listener.loop, []).append((listener, self._news_of(listener)))
            if request.is_finished:
                del self._listeners[id(request)]
        for loop, news in by_loop.items():
            if not _tell(loop, _put_all, news):  # its loop is gone, and so are its callers
                self._drop([listener for listener, _ in news])

    def _news_of(self, listener: _Listener) -> StreamChunk | Exception:
        request = listener.request
        if request.error is not None:
            return request.error
        try:
            chunk = self._opened.chunk(request, listener.num_seen)
        except Exception as error:  # its text cannot be made
            self._opened.engine.abort(request)
            return error
        listener.num_seen = request.num_output_tokens
        return chunk


def _put_all(news: Sequence[tuple[_Listener, StreamChunk | Exception]]) -> None:
    for listener, chunk in news:
        listener.news.put_nowait((listener.request, chunk))


def _set_result(future: "asyncio.Future[Result]", result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> bool:
    """Have a loop call something soon; False where the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True
