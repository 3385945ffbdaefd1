"""From what a dialect asks for to the engine's outputs: admitted, with a deadline, given up with its client, and measured."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.batch import RequestMaker
from paceline.engine.inputs import RequestOptions
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.grammar import Grammar
from paceline.sampling.params import SamplingParams
from paceline.server.client_watch import within
from paceline.server.gate import Gate
from paceline.server.http_errors import HttpError
from paceline.server.metrics import Metrics
from paceline.server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request wants of the engine.

    Attributes:
        prompt_ids: makes the token ids of each prompt; takes time, so it is called in a thread.
        num_prompts: how many it makes.
        params: of every prompt.
        takes_the_rest: whether `params.max_tokens` gives way to what the context holds behind a prompt.
        grammar: of the outputs, in place of that of `params`, once the prompts are made; None = that of `params`.
    """

    prompt_ids: Callable[[RequestMaker], list[list[int]]]
    num_prompts: int = 1
    params: SamplingParams
    options: RequestOptions = field(default_factory=lambda: RequestOptions())
    takes_the_rest: bool = False
    grammar: Callable[[], Grammar | None] | None = None

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.params.n


class Generation:
    """Runs jobs.

    Args:
        engine: stays its owner's, who closes it.
    """

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, gate: Gate, metrics: Metrics) -> None:
        self.engine, self.gate = engine, gate
        self._settings, self._metrics = settings, metrics

    async def collect(self, job: Job) -> list[RequestOutput]:
        """The whole outputs, prompt by prompt and in order of their samples.

        Raises:
            HttpError: it was refused or given up.
            PacelineError: as `AsyncEngine.generate`.
        """
        async with self._admitted(job) as (started_s, prompts):
            generating = self.engine.generate(prompts, self._params(job, prompts), **job.options)
            try:
                outputs = await within(self._remaining_s(started_s), generating)
            except TimeoutError:
                raise self._timed_out() from None
            for output in outputs:
                self._finish(output, started_s, job)
            return outputs

    async def stream(self, job: Job) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        """What every step adds, with the index of the prompt; the rest as for `collect`."""
        async with self._admitted(job) as (started_s, prompts):
            stream = self.engine.stream_batch(prompts, self._params(job, prompts), **job.options)
            async with aclosing(stream) as chunks:  # type: ignore[type-var]  # a generator
                while True:
                    try:
                        index, chunk = await within(self._remaining_s(started_s), anext(chunks))
                    except StopAsyncIteration:
                        return
                    except TimeoutError:
                        raise self._timed_out() from None
                    if chunk.output is not None:
                        self._finish(chunk.output, started_s, job)
                    yield index, chunk

    @asynccontextmanager
    async def _admitted(self, job: Job) -> AsyncIterator[tuple[float, list[list[int]]]]:
        """When a job began, and the ids of its prompts."""
        self.engine.check_open()
        with self.gate.admitted(job.num_samples, "n" if job.params.n > 1 else "prompt"):
            started_s = time.perf_counter()
            yield started_s, await asyncio.to_thread(job.prompt_ids, self.engine.opened.maker)
            self.gate.record(time.perf_counter() - started_s)

    def _params(self, job: Job, prompts: Sequence[list[int]]) -> list[SamplingParams]:
        params = job.params if job.grammar is None else replace(job.params, grammar=job.grammar())
        if not job.takes_the_rest:
            return [params] * len(prompts)
        opened = self.engine.opened
        room = min(opened.maker.max_context, opened.engine.cache.max_slots - BLOCK_SIZE)
        return [replace(params, max_tokens=max(1, room - len(ids))) for ids in prompts]

    def _finish(self, output: RequestOutput, started_s: float, job: Job) -> None:
        if output.finish_reason == "abort":
            raise HttpError(
                503, "the server ended before this request did: ask again later", kind="service_unavailable_error", code="draining"
            )
        adapter = job.options.get("adapter")
        self._metrics.observe(output, time.perf_counter() - started_s, adapter if isinstance(adapter, str) else None)

    def _remaining_s(self, started_s: float) -> float:
        return max(0.0, started_s + self._settings.request_timeout_s - time.perf_counter())

    def _timed_out(self) -> HttpError:
        return HttpError(
            504,
            f"the answer was not finished within {self._settings.request_timeout_s:g} s: ask for fewer tokens",
            kind="timeout_error",
            code="timeout",
        )
