"""An asyncio interface to an engine that one thread owns.

Callers of any event loop put commands into the thread's inbox. The thread runs the commands between two steps, and sends what each step
added through a queue of the caller's loop. So a request can be aborted at any moment. If the thread ends, for whatever reason, every
waiting caller gets an error, and later calls raise at once.
"""

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar, Unpack

from paceline.engine.engine import EngineStats
from paceline.engine.inputs import ChatOptions, Messages, Params, Prompt, RequestOptions, as_prompts, split_chat_options
from paceline.engine.loader import LoadedEngine, load_engine, parse_settings
from paceline.engine.request import EngineRequest
from paceline.errors import ConfigError, PacelineError, as_exception
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.params import SAMPLING_NAMES
from paceline.spelling import suggest_arguments

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Update = tuple[EngineRequest, StreamChunk | Exception]


@dataclass(slots=True)
class _Listener:
    """Receives the updates of a request.

    Attributes:
        updates: a queue of `loop`.
        sends_chunks: send an update after every step; False = only when the request has ended.
        num_sent: output tokens sent so far.
    """

    request: EngineRequest
    loop: asyncio.AbstractEventLoop
    updates: "asyncio.Queue[Update]"
    sends_chunks: bool
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class _Command:
    """A function for the thread to run, and a handler for the error if it cannot be run."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]


class AsyncEngine:
    """A loaded engine for many callers of any number of event loops. Its thread ends when this object is garbage-collected.

    Example:
        >>> async with AsyncEngine.open("mini") as engine:
        ...     async for chunk in engine.stream("The quick brown"):
        ...         print(chunk.text, end="")

    Args:
        loaded: only this object's thread may use it from now on.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        if not isinstance(loaded, LoadedEngine):
            raise ConfigError(f"AsyncEngine takes a loaded engine, not {loaded!r}: use AsyncEngine.open(model)")
        self._worker = _Worker(loaded)
        # a worker without a reference to this object lets it be garbage-collected; its daemon thread ends at exit
        weakref.finalize(self, self._worker.close).atexit = False

    @classmethod
    def open(cls, model: str = "mini", **options: Any) -> "AsyncEngine":
        """Load a model.

        Args:
            options: as for `LLM`.

        Raises:
            PacelineError: as for `LLM`.
        """
        return cls(load_engine(*parse_settings(model, options)))

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def loaded(self) -> LoadedEngine:
        """Tokenizer, settings and limits; its engine belongs to the thread."""
        return self._worker.loaded

    @suggest_arguments("generate", of_sampling=SAMPLING_NAMES)
    async def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> list[RequestOutput]:
        """Complete prompts, next to all other requests; arguments, order of the outputs and errors as for `LLM.generate`.

        Cancelling it frees everything. Closing the engine ends it with the finish reason "abort".
        """
        return await self._collect(self._encode(prompts), sampling_params, options)

    @suggest_arguments("chat", of_sampling=SAMPLING_NAMES)
    async def chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> list[RequestOutput]:
        """Answer one conversation, with `sampling_params.n` outputs; the rest as for `generate`."""
        ids, parser, request = await asyncio.to_thread(self.loaded.input_processor.chat, messages, options)
        outputs = await self._collect(lambda: [ids], sampling_params, request)
        return [parser.parsed(output) for output in outputs]

    @suggest_arguments("stream", of_sampling=SAMPLING_NAMES)
    def stream(self, prompt: Prompt, sampling_params: Params = None, **options: Unpack[RequestOptions]) -> AsyncIterator[StreamChunk]:
        """Complete one prompt and yield each new chunk; the last chunk of each sample has the whole output.

        A generator that is closed, cancelled or garbage-collected early aborts its request.
        """
        return self._stream(lambda: [self.loaded.input_processor.prompt_ids(prompt)], sampling_params, options)

    @suggest_arguments("stream_chat", of_sampling=SAMPLING_NAMES)
    def stream_chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> AsyncIterator[StreamChunk]:
        """Answer one conversation and yield each new chunk of the answer; chunks and cancellation as for `stream`."""
        prompt, request = split_chat_options(options)
        return self._stream(lambda: [self.loaded.input_processor.chat_ids(messages, **prompt)], sampling_params, request)

    @suggest_arguments("stream_batch", of_sampling=SAMPLING_NAMES)
    async def stream_batch(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Complete prompts and yield each new chunk with the index of its prompt; chunks and cancellation as for `stream`."""
        requests = await self._make_requests(self._encode(prompts), sampling_params, options, is_streamed=True)
        starts = accumulate(int(request.sample_index == 0) for request in requests)  # the samples of a prompt are consecutive
        index_of = {request: start - 1 for request, start in zip(requests, starts, strict=True)}
        async with aclosing(self._run_and_yield_updates(requests, sends_chunks=True)) as updates:
            async for request, chunk in updates:
                yield index_of[request], chunk

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can select."""
        return self.loaded.engine.adapters.names

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter while requests run; the rest as for `LLM.load_adapter`."""
        self._worker.check_open()
        await asyncio.to_thread(self.loaded.load_adapter, name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Reject requests for an adapter from now on; running ones keep it. As `LLM.unload_adapter`."""
        await self._call(lambda: self.loaded.engine.remove_adapter(name))

    def check_open(self) -> None:
        """Check that requests are accepted.

        Raises:
            ConfigError: the engine was closed, or belongs to another process.
            PacelineError: its thread ended because of an error.
        """
        self._worker.check_open()

    async def stats(self) -> EngineStats:
        """Return the engine's counters."""
        engine = self.loaded.engine
        return await self._call(lambda: engine.stats)

    async def close(self) -> None:
        """End all requests with the finish reason "abort", free everything and end the thread. May be called again."""
        self._worker.close()
        if (sandbox := self.loaded.input_processor.compiler.sandbox) is not None:
            sandbox.close()  # ends a running compilation, which would keep a thread and the engine alive
        await asyncio.to_thread(self._worker.join)

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> Callable[[], list[list[int]]]:
        return lambda: [self.loaded.input_processor.prompt_ids(one) for one in as_prompts(prompts)]

    async def _collect(self, prompts: Callable[[], list[list[int]]], params: Params, options: RequestOptions) -> list[RequestOutput]:
        requests = await self._make_requests(prompts, params, options, is_streamed=False)
        outputs: dict[EngineRequest, RequestOutput] = {}
        async with aclosing(self._run_and_yield_updates(requests, sends_chunks=False)) as updates:
            async for request, chunk in updates:
                if chunk.output is not None:
                    outputs[request] = chunk.output
        return [outputs[request] for request in requests]

    async def _stream(self, prompts: Callable[[], list[list[int]]], params: Params, options: RequestOptions) -> AsyncIterator[StreamChunk]:
        requests = await self._make_requests(prompts, params, options, is_streamed=True)
        async with aclosing(self._run_and_yield_updates(requests, sends_chunks=True)) as updates:
            async for _, chunk in updates:
                yield chunk

    async def _make_requests(
        self, prompts: Callable[[], list[list[int]]], params: Params, options: RequestOptions, *, is_streamed: bool
    ) -> list[EngineRequest]:
        """Make requests in a separate thread: tokenizing and compiling grammars would block the event loop or the engine."""
        self._worker.check_open()
        return await asyncio.to_thread(lambda: self.loaded.requests(prompts(), params, options, is_streamed=is_streamed))

    async def _run_and_yield_updates(
        self, requests: Sequence[EngineRequest], *, sends_chunks: bool
    ) -> AsyncGenerator[tuple[EngineRequest, StreamChunk], None]:
        """Run requests and yield their updates until all have ended; abort them if the generator is closed before."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        listeners = [_Listener(request, loop, updates, sends_chunks) for request in requests]
        self._worker.run(listeners)
        num_open = len(requests)
        try:
            while num_open:
                request, chunk = await updates.get()
                if isinstance(chunk, Exception):
                    raise chunk
                num_open -= chunk.output is not None
                yield request, chunk
        finally:
            if num_open:
                self._worker.abort(listeners)

    async def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread and return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def resolve(set_outcome: Callable[[Any], None], outcome: object) -> None:
            if not future.done():
                set_outcome(outcome)

        def run() -> None:
            _call_soon(loop, resolve, future.set_result, function())

        def fail(error: Exception) -> None:
            _call_soon(loop, resolve, future.set_exception, error)

        self._worker.submit(_Command(run, fail))
        return await future


class _Worker:
    """The thread that owns the engine, and its inbox.

    Attributes:
        thread: refers to this object but not to the `AsyncEngine`, so that the latter can be garbage-collected.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded = loaded
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._inbox_lock = Lock()  # held so that no command is queued after the one that ends the thread
        self._listeners: dict[EngineRequest, _Listener] = {}  # used by the thread only
        self._closed: tuple[type[PacelineError], str] | None = None  # error type and text for calls after the end of the thread
        self._is_ending = False
        self._process_id = os.getpid()
        self.thread = Thread(target=self._run_until_closed, name="paceline-engine", daemon=True)
        self.thread.start()

    def check_open(self) -> None:
        """Check that the thread accepts commands; errors as for `AsyncEngine.check_open`."""
        if not self._is_own_process:
            raise ConfigError(f"the engine was opened in process {self._process_id}, which forked this one: open one in each process")
        if self._closed is not None:
            kind, text = self._closed
            raise kind(text)

    def submit(self, command: _Command) -> None:
        """Queue a command, which runs between two steps; errors as for `check_open`."""
        self.check_open()
        with self._inbox_lock:
            self.check_open()
            self._inbox.put(command)

    def run(self, listeners: Sequence[_Listener]) -> None:
        """Run the requests of listeners, which get updates until their requests have ended."""
        self.submit(_Command(lambda: self._add(listeners), lambda error: _send_error(listeners[0], error)))

    def abort(self, listeners: Sequence[_Listener]) -> None:
        """Abort the requests of listeners that have not ended. Never raises."""
        if self._is_own_process:
            self._inbox.put(_Command(lambda: self._abort(listeners), lambda _: None))

    def close(self) -> None:
        """End all requests with the finish reason "abort", free everything and end the thread soon. May be called again."""
        if not self._is_own_process:  # a forked process has no such thread, and locks may be held for ever
            return
        with self._inbox_lock:
            if self._closed is None:
                self._closed = ConfigError, "the engine is closed: open another one"
                self._inbox.put(_Command(self._close_engine, lambda _: None))

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._is_own_process:
            self.thread.join()

    @property
    def _is_own_process(self) -> bool:
        return self._process_id == os.getpid()

    # The methods below run in the engine's thread.

    def _run_until_closed(self) -> None:
        fault: BaseException | None = None
        try:
            while not self._is_ending:
                self._run_once()
            for listener in list(self._listeners.values()):
                self.loaded.engine.abort(listener.request)
            self._send_updates()
        except BaseException as error:
            fault = error
            log.critical("the engine's thread ended", exc_info=True)
        finally:
            self._shut_down(fault)

    def _run_once(self) -> None:
        """Run the commands in the inbox, then a step. An error ends the requests in the engine, and later ones may succeed."""
        engine = self.loaded.engine
        try:
            self._run_commands(is_idle=not engine.has_work)
            if engine.has_work:
                engine.step()
        except BaseException as error:  # errors of single requests are handled inside the step
            log.exception("a step of the engine failed")
            self._fail_all(as_exception(error))
        self._send_updates()

    def _run_commands(self, *, is_idle: bool) -> None:
        """Run the commands in the inbox; wait for one if the engine is idle."""
        try:
            command = self._inbox.get(block=is_idle)
            while True:
                try:
                    command.run()
                except BaseException as error:
                    command.fail(as_exception(error))
                command = self._inbox.get_nowait()
        except Empty:
            return

    def _add(self, listeners: Sequence[_Listener]) -> None:
        engine = self.loaded.engine
        for listener in listeners:
            engine.check(listener.request)  # raises to the caller before any of the requests runs
        for listener in listeners:
            engine.add(listener.request)
            self._listeners[listener.request] = listener

    def _abort(self, listeners: Sequence[_Listener]) -> None:
        for listener in listeners:
            self.loaded.engine.abort(listener.request)
            self._listeners.pop(listener.request, None)

    def _close_engine(self) -> None:
        self._is_ending = True

    def _shut_down(self, fault: BaseException | None) -> None:
        """Send an error to every waiting caller, and reject later ones."""
        with self._inbox_lock:
            if fault is not None:
                self._closed = PacelineError, f"the engine's thread ended ({type(fault).__name__}: {fault}): open another engine"
            kind, text = self._closed or (PacelineError, "the engine's thread ended: open another engine")
        error = kind(text)
        for listener in self._listeners.values():
            _send_error(listener, error)
        self._listeners.clear()
        while True:
            try:
                self._inbox.get_nowait().fail(error)
            except Empty:
                return

    def _fail_all(self, error: Exception) -> None:
        for listener in self._listeners.values():
            if not listener.request.is_finished:
                listener.request.fail(error)
            self.loaded.engine.abort(listener.request)

    def _send_updates(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, StreamChunk | Exception]]] = {}
        for listener in list(self._listeners.values()):
            request = listener.request
            is_new = listener.sends_chunks and request.num_output_tokens > listener.num_sent
            if not (is_new or request.is_finished):
                continue
            by_loop.setdefault(listener.loop, []).append((listener, self._update_of(listener)))
            if request.is_finished:
                del self._listeners[request]
        for loop, updates in by_loop.items():
            if not _call_soon(loop, _put_all, updates):  # if the loop is closed, no caller waits
                self._abort([listener for listener, _ in updates])

    def _update_of(self, listener: _Listener) -> StreamChunk | Exception:
        request = listener.request
        if request.error is not None:
            return request.error
        try:
            chunk = self.loaded.chunk(request, listener.num_sent)
        except BaseException as error:  # the tokens of this request cannot be decoded
            self.loaded.engine.abort(request)
            return as_exception(error)
        listener.num_sent = request.num_output_tokens
        return chunk


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> bool:
    """Schedule a call in a loop; return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True


def _put_all(updates: Sequence[tuple[_Listener, StreamChunk | Exception]]) -> None:
    for listener, chunk in updates:
        listener.updates.put_nowait((listener.request, chunk))


def _send_error(listener: _Listener, error: Exception) -> None:
    _call_soon(listener.loop, listener.updates.put_nowait, (listener.request, error))
