"""Running generation requests on the engine: admission, deadline, cancellation and metrics."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.input_processor import InputProcessor
from paceline.engine.inputs import RequestOptions
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.grammars.grammar import Grammar
from paceline.sampling.params import SamplingParams
from paceline.server.admission import AdmissionControl, shutting_down
from paceline.server.errors import HttpError
from paceline.server.metrics import Metrics
from paceline.server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """The prompts and sampling parameters of one HTTP request.

    Attributes:
        prompt_ids: makes the token ids of each prompt; slow, so it is called in a thread.
        num_prompts: number of prompts.
        params: of every prompt.
        fills_context: whether `params.max_tokens` is replaced by the rest of the context after each prompt.
        grammar: called after the prompts are made, replaces the grammar of `params`; None = keep that of `params`.
    """

    prompt_ids: Callable[[InputProcessor], list[list[int]]]
    num_prompts: int = 1
    params: SamplingParams
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    fills_context: bool = False
    grammar: Callable[[], Grammar | None] | None = None


class Generation:
    """Runs generation requests.

    Args:
        engine: closed by the caller.
    """

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, admission: AdmissionControl, metrics: Metrics) -> None:
        self.engine, self.admission = engine, admission
        self._settings, self._metrics = settings, metrics

    async def collect(self, request: GenerationRequest) -> list[RequestOutput]:
        """Generate and return the complete outputs, ordered by prompt, then by sample.

        Raises:
            HttpError: the request was refused, timed out or was ended by a shutdown.
            PacelineError: as `AsyncEngine.generate`.
        """
        async with self._admitted(request) as (deadline_s, prompts, params):
            generating = self.engine.generate(prompts, params, **request.options)
            try:
                async with asyncio.timeout_at(deadline_s):
                    outputs = await generating
            except TimeoutError:
                raise self._timed_out() from None
            for output in outputs:
                self._finish(output, deadline_s, request)
            return outputs

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        """Generate the outputs and yield each new chunk with the index of its prompt; errors as for `collect`."""
        async with self._admitted(request) as (deadline_s, prompts, params):
            stream = self.engine.stream_batch(prompts, params, **request.options)
            async with aclosing(stream) as chunks:  # type: ignore[type-var]  # a generator
                while True:
                    try:
                        async with asyncio.timeout_at(deadline_s):  # not around the loop: a generator must not yield inside it
                            index, chunk = await anext(chunks)
                    except StopAsyncIteration:
                        return
                    except TimeoutError:
                        raise self._timed_out() from None
                    if chunk.output is not None:
                        self._finish(chunk.output, deadline_s, request)
                    yield index, chunk

    @asynccontextmanager
    async def _admitted(self, request: GenerationRequest) -> AsyncIterator[tuple[float, list[list[int]], list[SamplingParams]]]:
        """Yield the deadline of a request in the loop's time, the ids of its prompts and their parameters."""
        self.engine.check_open()
        n = request.params.n
        with self.admission.admitted(request.num_prompts * n, "n" if n > 1 else "prompt"):
            started_s = _now_s()
            prompts, params = await asyncio.to_thread(self._prepared, request)
            yield started_s + self._settings.request_timeout_s, prompts, params
            self.admission.record_duration(_now_s() - started_s)

    def _prepared(self, request: GenerationRequest) -> tuple[list[list[int]], list[SamplingParams]]:
        """Tokenise the prompts and build their parameters. Slow: called in a thread."""
        prompts = request.prompt_ids(self.engine.loaded.input_processor)
        params = request.params if request.grammar is None else replace(request.params, grammar=request.grammar())
        if not request.fills_context:
            return prompts, [params] * len(prompts)
        loaded = self.engine.loaded
        room = min(loaded.input_processor.max_model_len, loaded.engine.cache.max_slots - BLOCK_SIZE)
        return prompts, [replace(params, max_tokens=max(1, room - len(ids))) for ids in prompts]

    def _finish(self, output: RequestOutput, deadline_s: float, request: GenerationRequest) -> None:
        if output.finish_reason == "abort":
            raise shutting_down()
        adapter = request.options.get("adapter")
        elapsed_s = _now_s() - deadline_s + self._settings.request_timeout_s
        self._metrics.observe(output, elapsed_s, adapter if isinstance(adapter, str) else None)

    def _timed_out(self) -> HttpError:
        text = f"the request was not finished within {self._settings.request_timeout_s:g} s: lower max_tokens"
        return HttpError(504, text, kind="timeout_error", code="timeout")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
