"""An asyncio interface to an engine that one thread owns.

Callers in any event loop put commands into the inbox of the engine's thread. The thread runs the commands between two steps of the
engine. After each step it sends new tokens to each caller through an asyncio queue. If the thread ends, even because of a bug, every
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
from paceline.engine.inputs import ChatOptions, Messages, Params, Prompt, RequestOptions, list_prompts, split_chat_options
from paceline.engine.loader import LoadedEngine, load_engine, parse_settings
from paceline.engine.request import EngineRequest
from paceline.errors import ConfigError, PacelineError, as_exception
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.params import SAMPLING_PARAM_NAMES
from paceline.spelling import suggest_arguments

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
RequestUpdate = tuple[EngineRequest, StreamChunk | Exception]
"""A request with its new output, or with the error that ended it."""
PromptEncoder = Callable[[], list[list[int]]]
"""A function that returns the token ids of prompts. It runs in another thread, because tokenizing blocks."""
Command = tuple[Callable[[], None], Callable[[Exception], None]]
"""A function for the engine's thread, and a handler that is called with the error if the function raises or is never run."""


@dataclass(slots=True)
class _Listener:
    """The asyncio queue that receives the updates of one request.

    Attributes:
        loop: the caller's event loop.
        updates: the caller's queue, which belongs to `loop`.
        is_streamed: whether to send an update after every step; False = only when the request has ended.
        num_sent: number of output tokens sent so far.
    """

    request: EngineRequest
    loop: asyncio.AbstractEventLoop
    updates: "asyncio.Queue[RequestUpdate]"
    is_streamed: bool
    num_sent: int = 0


class AsyncEngine:
    """A loaded engine that asyncio tasks share, in one or several event loops. Its thread ends when this object is garbage-collected.

    Example:
        >>> async with AsyncEngine.open("mini") as engine:
        ...     async for chunk in engine.stream("The quick brown"):
        ...         print(chunk.text, end="")

    Args:
        loaded: the engine. Afterwards, only the thread of this object may call its `step`.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        if not isinstance(loaded, LoadedEngine):
            raise ConfigError(f"AsyncEngine takes a loaded engine, not {loaded!r}: use AsyncEngine.open(model)")
        self._worker = _Worker(loaded)
        # at interpreter exit, the worker need not be closed, because its thread is a daemon
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
        """The engine with its tokenizer, settings and limits. Only the engine's thread may call its `step`."""
        return self._worker.loaded

    @suggest_arguments("generate", sampling_names=SAMPLING_PARAM_NAMES)
    async def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> list[RequestOutput]:
        """Complete prompts while other requests run; arguments, order of the outputs and errors as for `LLM.generate`.

        If the call is cancelled, its requests are aborted. If the engine is closed, the outputs so far are returned with the finish reason
        "abort".
        """
        return await self._collect_outputs(self._prompt_encoder(prompts), sampling_params, options)

    @suggest_arguments("chat", sampling_names=SAMPLING_PARAM_NAMES)
    async def chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> list[RequestOutput]:
        """Answer one conversation and return `sampling_params.n` outputs; cancellation and errors as for `generate`."""
        ids, parser, request = await asyncio.to_thread(self.loaded.input_processor.prepare_chat, messages, options)
        outputs = await self._collect_outputs(lambda: [ids], sampling_params, request)
        return [parser.parse(output) for output in outputs]

    @suggest_arguments("stream", sampling_names=SAMPLING_PARAM_NAMES)
    def stream(self, prompt: Prompt, sampling_params: Params = None, **options: Unpack[RequestOptions]) -> AsyncIterator[StreamChunk]:
        """Complete one prompt and yield each new chunk; the last chunk of each sample contains its whole output.

        If the generator is closed, cancelled or garbage-collected before its end, the request is aborted.
        """
        return self._stream_chunks(lambda: [self.loaded.input_processor.prompt_ids(prompt)], sampling_params, options)

    @suggest_arguments("stream_chat", sampling_names=SAMPLING_PARAM_NAMES)
    def stream_chat(self, messages: Messages, sampling_params: Params = None, **options: Unpack[ChatOptions]) -> AsyncIterator[StreamChunk]:
        """Answer one conversation and yield each new chunk of the answer; chunks and cancellation as for `stream`."""
        prompt, request = split_chat_options(options)
        return self._stream_chunks(lambda: [self.loaded.input_processor.chat_token_ids(messages, **prompt)], sampling_params, request)

    @suggest_arguments("stream_batch", sampling_names=SAMPLING_PARAM_NAMES)
    async def stream_batch(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Complete prompts and yield each new chunk with the index of its prompt; chunks and cancellation as for `stream`."""
        requests = await self._make_requests(self._prompt_encoder(prompts), sampling_params, options, is_streamed=True)
        prompt_numbers = accumulate(int(request.sample_index == 0) for request in requests)  # samples of a prompt are consecutive
        prompt_index = {request: number - 1 for request, number in zip(requests, prompt_numbers, strict=True)}
        async with aclosing(self._run_and_yield_updates(requests, is_streamed=True)) as updates:
            async for request, chunk in updates:
                yield prompt_index[request], chunk

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can select."""
        return self.loaded.engine.adapters.names

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter while requests run; arguments and errors as for `LLM.load_adapter`."""
        self._worker.check_open()
        await asyncio.to_thread(self.loaded.load_adapter, name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Reject new requests for an adapter; running requests still use it. Errors as for `LLM.unload_adapter`."""
        await self._run_in_engine_thread(lambda: self.loaded.engine.remove_adapter(name))

    def check_open(self) -> None:
        """Check that the engine accepts requests.

        Raises:
            ConfigError: the engine was closed, or this process was forked from the process that opened the engine.
            PacelineError: the engine's thread ended because of an error.
        """
        self._worker.check_open()

    async def stats(self) -> EngineStats:
        """Return the engine's counters."""
        engine = self.loaded.engine
        return await self._run_in_engine_thread(lambda: engine.stats)

    async def close(self) -> None:
        """End all requests with the finish reason "abort", free the engine and end the thread. A second call does nothing."""
        self._worker.close()
        if (sandbox := self.loaded.input_processor.grammar_compiler.sandbox) is not None:
            sandbox.close()  # a grammar that is being compiled would keep a thread and the engine alive
        if self._worker.is_own_process:
            # a method of the worker would keep the worker alive, because asyncio's thread pool may keep a reference to the method
            await asyncio.to_thread(self._worker.thread.join)

    def _prompt_encoder(self, prompts: Prompt | Sequence[Prompt]) -> PromptEncoder:
        return lambda: [self.loaded.input_processor.prompt_ids(prompt) for prompt in list_prompts(prompts)]

    async def _collect_outputs(self, encode_prompts: PromptEncoder, params: Params, options: RequestOptions) -> list[RequestOutput]:
        requests = await self._make_requests(encode_prompts, params, options, is_streamed=False)
        outputs: dict[EngineRequest, RequestOutput] = {}
        async with aclosing(self._run_and_yield_updates(requests, is_streamed=False)) as updates:
            async for request, chunk in updates:
                if chunk.output is not None:
                    outputs[request] = chunk.output
        return [outputs[request] for request in requests]

    async def _stream_chunks(self, encode_prompts: PromptEncoder, params: Params, options: RequestOptions) -> AsyncIterator[StreamChunk]:
        requests = await self._make_requests(encode_prompts, params, options, is_streamed=True)
        async with aclosing(self._run_and_yield_updates(requests, is_streamed=True)) as updates:
            async for _, chunk in updates:
                yield chunk

    async def _make_requests(
        self, encode_prompts: PromptEncoder, params: Params, options: RequestOptions, *, is_streamed: bool
    ) -> list[EngineRequest]:
        """Make requests in another thread, because tokenizing and compiling grammars would block the event loop."""
        self._worker.check_open()
        return await asyncio.to_thread(lambda: self.loaded.make_requests(encode_prompts(), params, options, is_streamed=is_streamed))

    async def _run_and_yield_updates(
        self, requests: Sequence[EngineRequest], *, is_streamed: bool
    ) -> AsyncGenerator[tuple[EngineRequest, StreamChunk], None]:
        """Run requests and yield their updates until all have ended. If the generator is closed earlier, abort them."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[RequestUpdate]()
        listeners = [_Listener(request, loop, updates, is_streamed) for request in requests]
        self._worker.add_requests(listeners)
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
                self._worker.abort_requests(listeners)

    async def _run_in_engine_thread(self, function: Callable[[], ResultT]) -> ResultT:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResultT] = loop.create_future()

        def set_if_pending(set_result_or_error: Callable[[Any], None], outcome: object) -> None:
            if not future.done():
                set_result_or_error(outcome)

        def run_and_resolve() -> None:
            _call_soon(loop, set_if_pending, future.set_result, function())

        def reject(error: Exception) -> None:
            _call_soon(loop, set_if_pending, future.set_exception, error)

        self._worker.submit((run_and_resolve, reject))
        return await future


class _Worker:
    """The thread that owns the engine, and the inbox of its commands.

    Attributes:
        thread: has a reference to this object but not to the `AsyncEngine`, which can therefore be garbage-collected.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded = loaded
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._inbox_lock = Lock()  # no command may be queued after `_stop_thread`: it would never run
        self._listeners: dict[EngineRequest, _Listener] = {}  # only the engine's thread may use it
        self._closed: tuple[type[PacelineError], str] | None = None  # after the end: type and text of the error that later calls raise
        self._is_ending = False
        self._process_id = os.getpid()
        self.thread = Thread(target=self._run_until_closed, name="paceline-engine", daemon=True)
        self.thread.start()

    def check_open(self) -> None:
        """Check that commands are accepted; errors as for `AsyncEngine.check_open`."""
        if not self.is_own_process:
            raise ConfigError(f"the engine was opened in process {self._process_id}, which forked this one: open one in each process")
        if self._closed is not None:
            error_type, text = self._closed
            raise error_type(text)

    def submit(self, command: Command) -> None:
        """Queue a command, which the thread runs between two steps; errors as for `check_open`."""
        self.check_open()
        with self._inbox_lock:
            self.check_open()
            self._inbox.put(command)

    def add_requests(self, listeners: Sequence[_Listener]) -> None:
        """Add the requests of listeners to the engine. Each listener gets updates until its request has ended."""
        self.submit((lambda: self._add_requests_to_engine(listeners), lambda error: _send_error(listeners[0], error)))

    def abort_requests(self, listeners: Sequence[_Listener]) -> None:
        """Abort the listeners' requests that have not ended. Never raises."""
        if self.is_own_process:
            self._inbox.put((lambda: self._abort_requests_in_engine(listeners), lambda _: None))

    def close(self) -> None:
        """End all requests with the finish reason "abort", and end the thread after the current step. A second call does nothing."""
        if not self.is_own_process:  # a forked process does not have the thread, and a lock that the thread held is never released
            return
        with self._inbox_lock:
            if self._closed is None:
                self._closed = ConfigError, "the engine is closed: open another one"
                self._inbox.put((self._stop_thread, lambda _: None))

    @property
    def is_own_process(self) -> bool:
        """Whether the thread exists in this process. A forked process has no copy of it."""
        return self._process_id == os.getpid()

    # The methods below run in the engine's thread.

    def _run_until_closed(self) -> None:
        thread_error: BaseException | None = None
        try:
            while not self._is_ending:
                self._run_one_step()
            for listener in list(self._listeners.values()):
                self.loaded.engine.abort_request(listener.request)
            self._send_updates()
        except BaseException as error:
            thread_error = error
            log.critical("the engine's thread ended", exc_info=True)
        finally:
            self._shut_down(thread_error)

    def _run_one_step(self) -> None:
        """Run the commands in the inbox, then one step. An error ends all requests in the engine, but not the thread."""
        engine = self.loaded.engine
        try:
            self._run_commands(is_idle=not engine.has_work)
            if engine.has_work:
                engine.step()
        except BaseException as error:  # `Engine.step` handles errors of single requests
            log.exception("a step of the engine failed")
            self._fail_all_requests(as_exception(error))
        self._send_updates()

    def _run_commands(self, *, is_idle: bool) -> None:
        """Run the commands in the inbox; wait for one if the engine is idle."""
        try:
            run, fail = self._inbox.get(block=is_idle)
            while True:
                try:
                    run()
                except BaseException as error:
                    fail(as_exception(error))
                run, fail = self._inbox.get_nowait()
        except Empty:
            return

    def _add_requests_to_engine(self, listeners: Sequence[_Listener]) -> None:
        engine = self.loaded.engine
        for listener in listeners:
            engine.check_request(listener.request)  # if one request is invalid, none is added
        for listener in listeners:
            engine.add_request(listener.request)
            self._listeners[listener.request] = listener

    def _abort_requests_in_engine(self, listeners: Sequence[_Listener]) -> None:
        for listener in listeners:
            self.loaded.engine.abort_request(listener.request)
            self._listeners.pop(listener.request, None)

    def _stop_thread(self) -> None:
        self._is_ending = True

    def _shut_down(self, cause: BaseException | None) -> None:
        """Send an error to every waiting caller, and reject later calls."""
        with self._inbox_lock:
            if cause is not None:
                self._closed = PacelineError, f"the engine's thread ended ({type(cause).__name__}: {cause}): open another engine"
            error_type, text = self._closed or (PacelineError, "the engine's thread ended: open another engine")
        error = error_type(text)
        for listener in self._listeners.values():
            _send_error(listener, error)
        self._listeners.clear()
        while True:
            try:
                _, fail = self._inbox.get_nowait()
                fail(error)
            except Empty:
                return

    def _fail_all_requests(self, error: Exception) -> None:
        for listener in self._listeners.values():
            if not listener.request.is_finished:
                listener.request.fail(error)
            self.loaded.engine.abort_request(listener.request)

    def _send_updates(self) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, StreamChunk | Exception]]] = {}
        for listener in list(self._listeners.values()):
            request = listener.request
            is_new = listener.is_streamed and request.num_output_tokens > listener.num_sent
            if not (is_new or request.is_finished):
                continue
            by_loop.setdefault(listener.loop, []).append((listener, self._new_chunk_or_error(listener)))
            if request.is_finished:
                del self._listeners[request]
        for loop, updates in by_loop.items():
            if not _call_soon(loop, _put_in_queues, updates):  # a closed event loop has no waiting caller
                self._abort_requests_in_engine([listener for listener, _ in updates])

    def _new_chunk_or_error(self, listener: _Listener) -> StreamChunk | Exception:
        request = listener.request
        if request.error is not None:
            return request.error
        try:
            chunk = self.loaded.make_chunk(request, listener.num_sent)
        except BaseException as error:  # decoding the tokens failed: end this request only
            self.loaded.engine.abort_request(request)
            return as_exception(error)
        listener.num_sent = request.num_output_tokens
        return chunk


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> bool:
    """Schedule a call in a loop; return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def _put_in_queues(updates: Sequence[tuple[_Listener, StreamChunk | Exception]]) -> None:
    for listener, chunk in updates:
        listener.updates.put_nowait((listener.request, chunk))


def _send_error(listener: _Listener, error: Exception) -> None:
    _call_soon(listener.loop, listener.updates.put_nowait, (listener.request, error))
