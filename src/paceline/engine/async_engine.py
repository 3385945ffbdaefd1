"""Many callers at once: an asyncio front, and one thread behind it that owns the engine (`engine/worker.py`).

Callers never touch the engine. They leave commands in an inbox, which the thread empties between two steps, and get what every step
adds through a queue of their event loop. So a request can be aborted at any moment, from any loop, and nothing of it stays.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, Unpack

from paceline.engine.engine import EngineStats
from paceline.engine.inputs import ChatOptions, Messages, Params, Prompt, RequestOptions, as_prompts, one_of, split_chat_options
from paceline.engine.open import OpenedEngine, open_engine, settings_of
from paceline.engine.request import EngineRequest
from paceline.engine.worker import Command, Listener, Update, Worker, call_soon
from paceline.errors import ConfigError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.params import SAMPLING_NAMES
from paceline.spelling import suggest_arguments

Result = TypeVar("Result")


class AsyncEngine:
    """A loaded target that serves many callers of any number of event loops at once. Its thread ends when it is collected as garbage.

    Example:
        >>> async with AsyncEngine.open("mini") as engine:
        ...     async for chunk in engine.stream("The quick brown"):
        ...         print(chunk.text, end="")

    Args:
        opened: from now on only this object's thread may use it.
    """

    def __init__(self, opened: OpenedEngine) -> None:
        if not isinstance(opened, OpenedEngine):
            raise ConfigError(f"AsyncEngine is made of an engine that is open, not of {opened!r}: use AsyncEngine.open(model)")
        self._worker = Worker(opened)
        # the worker must not hold this object; and at the interpreter's end its thread ends by itself
        weakref.finalize(self, self._worker.close).atexit = False

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
        return self._worker.opened

    @suggest_arguments("generate", of_sampling=SAMPLING_NAMES)
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Complete prompts, beside whatever else is running; arguments, order of the outputs and errors as for `LLM.generate`.

        Given up (cancelled), it frees everything. Closing the engine ends it with the finish reason "abort".
        """
        maker = self.opened.maker
        return await self._collect(lambda: [maker.prompt_ids(one) for one in as_prompts(prompts)], one_of(params, sampling_params), options)

    @suggest_arguments("chat", of_sampling=SAMPLING_NAMES)
    async def chat(
        self, messages: Messages, params: Params = None, *, sampling_params: Params = None, **options: Unpack[ChatOptions]
    ) -> list[RequestOutput]:
        """Answer one conversation, with `params.n` outputs; the rest as for `generate`."""
        ids, parser, request = await asyncio.to_thread(self.opened.maker.chat, messages, options)
        outputs = await self._collect(lambda: [ids], one_of(params, sampling_params), request)
        return [parser.parsed(output) for output in outputs]

    @suggest_arguments("stream", of_sampling=SAMPLING_NAMES)
    def stream(
        self, prompt: Prompt, params: Params = None, *, sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[StreamChunk]:
        """Complete one prompt and yield each new chunk; the last chunk of each sample has the whole output.

        A generator that is closed, cancelled or garbage-collected early aborts its request.
        """
        return self._stream(lambda: [self.opened.maker.prompt_ids(prompt)], one_of(params, sampling_params), options)

    @suggest_arguments("stream_chat", of_sampling=SAMPLING_NAMES)
    def stream_chat(
        self, messages: Messages, params: Params = None, *, sampling_params: Params = None, **options: Unpack[ChatOptions]
    ) -> AsyncIterator[StreamChunk]:
        """Answer one conversation and yield each new chunk of the answer; chunks and cancellation as for `stream`."""
        prompt, request = split_chat_options(options)
        return self._stream(lambda: [self.opened.maker.chat_ids(messages, **prompt)], one_of(params, sampling_params), request)

    @suggest_arguments("stream_batch", of_sampling=SAMPLING_NAMES)
    async def stream_batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Complete prompts and yield each new chunk with the index of its prompt; chunks and cancellation as for `stream`."""
        maker = self.opened.maker
        requests = await self._make(
            lambda: [maker.prompt_ids(one) for one in as_prompts(prompts)], one_of(params, sampling_params), options, is_streamed=True
        )
        starts = accumulate(int(request.sample_index == 0) for request in requests)  # the samples of a prompt stand together
        index_of = {request: start - 1 for request, start in zip(requests, starts, strict=True)}
        async with aclosing(self._follow(requests, wants_chunks=True)) as updates:
            async for request, chunk in updates:
                yield index_of[request], chunk

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may ask for."""
        return self.opened.engine.adapters.names

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter while requests run; the rest as for `LLM.load_adapter`."""
        self._worker.check_open()
        await asyncio.to_thread(self.opened.load_adapter, name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on; running ones end with it. As `LLM.unload_adapter`."""
        await self._call(lambda: self.opened.engine.remove_adapter(name))

    def check_open(self) -> None:
        """That requests are still taken.

        Raises:
            ConfigError: the engine was closed, or it is another process's.
            PacelineError: its thread ended because of a fault.
        """
        self._worker.check_open()

    async def stats(self) -> EngineStats:
        """What the engine did so far, and who is in it."""
        engine = self.opened.engine
        return await self._call(lambda: engine.stats)

    async def close(self) -> None:
        """End all requests with the finish reason "abort", free everything and end the thread; nothing happens the second time."""
        self._worker.close()
        if (sandbox := self.opened.maker.compiler.sandbox) is not None:
            sandbox.close()  # else threads that wait for a compilation outlive the engine
        await asyncio.to_thread(self._worker.join)

    async def _collect(self, prompts: Callable[[], list[list[int]]], params: Params, options: RequestOptions) -> list[RequestOutput]:
        requests = await self._make(prompts, params, options, is_streamed=False)
        outputs: dict[EngineRequest, RequestOutput] = {}
        async with aclosing(self._follow(requests, wants_chunks=False)) as updates:
            async for request, chunk in updates:
                if chunk.output is not None:
                    outputs[request] = chunk.output
        return [outputs[request] for request in requests]

    async def _stream(self, prompts: Callable[[], list[list[int]]], params: Params, options: RequestOptions) -> AsyncIterator[StreamChunk]:
        requests = await self._make(prompts, params, options, is_streamed=True)
        async with aclosing(self._follow(requests, wants_chunks=True)) as updates:
            async for _, chunk in updates:
                yield chunk

    async def _make(
        self, prompts: Callable[[], list[list[int]]], params: Params, options: RequestOptions, *, is_streamed: bool
    ) -> list[EngineRequest]:
        """Tokenising and compiling take time: neither the event loop nor the engine's thread waits for them."""
        self._worker.check_open()
        return await asyncio.to_thread(lambda: self.opened.requests(prompts(), params, options, is_streamed=is_streamed))

    async def _follow(
        self, requests: Sequence[EngineRequest], *, wants_chunks: bool
    ) -> AsyncGenerator[tuple[EngineRequest, StreamChunk], None]:
        """Run requests, yielding their updates until all have ended; they are aborted if this is left before."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        listeners = [Listener(request, loop, updates, wants_chunks) for request in requests]
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

    async def _call(self, ask: Callable[[], Result]) -> Result:
        """The answer of the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()

        def do() -> None:
            call_soon(loop, _set_result, answer, ask())

        def fail(error: Exception) -> None:
            call_soon(loop, _set_exception, answer, error)

        self._worker.submit(Command(do, fail))
        return await answer


def _set_result(future: "asyncio.Future[Result]", result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[Result]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
