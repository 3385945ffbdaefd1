"""The engine: adds requests, runs them together step by step on one target model, and frees their resources when they end."""

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from threading import Lock, get_ident
from typing import Any

from paceline.engine.adapters import Adapters
from paceline.engine.request import EngineRequest
from paceline.engine.scheduler import BlockManager, Scheduler, SchedulerLimits
from paceline.errors import CapacityError, ConfigError, PacelineError, RequestError, as_exception, is_interrupt, prompt_too_long_text
from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.row_plan import num_blocks_for
from paceline.models.adapters.adapter import Adapter
from paceline.runtimes.base import Network
from paceline.speculation.request import FinishReason
from paceline.speculation.speculator import Speculator
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step import PassInterrupted, step

LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets of `InterTokenLatency`; another bucket counts longer times."""


@dataclass(slots=True)
class InterTokenLatency:
    """Histogram of the times between steps that emitted tokens of the same request. Several tokens of one step are counted as one."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, latency_s: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS_S, latency_s)] += 1
        self.total_s += latency_s


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was created. Tokens and `speculation` include only requests that ended without an error.

    Attributes:
        num_steps: forward passes of the target, prefill chunks included.
        num_mixture_passes: further passes, which compute the scalings of X-LoRA adapters and are not in `num_steps`.
        num_preemptions: how often the cached rows of a request were dropped to free blocks, and computed again later.
        num_finished, num_aborted, num_failed: requests by how they ended.
        num_running, num_waiting: requests that are running or waiting now.
        num_cached_tokens: prompt tokens whose rows were found in the prefix cache.
        drafter_failures: how often a drafter raised an error or returned an invalid draft. Such a step runs without a draft.
        inter_token_latency: histogram over all requests.
        speculation: speculation statistics over all requests.
    """

    num_steps: int = 0
    num_mixture_passes: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    num_cached_tokens: int = 0
    completion_tokens: int = 0
    drafter_failures: int = 0
    inter_token_latency: InterTokenLatency = field(default_factory=InterTokenLatency)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as a JSON object."""
        return {**asdict(self), "speculation": self.speculation.as_dict()}

    def count_request(self, request: EngineRequest) -> None:
        if request.error is not None:
            self.num_failed += 1
            return
        if request.finish_reason is FinishReason.ABORT:
            self.num_aborted += 1
        else:
            self.num_finished += 1
        self.prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.completion_tokens += request.num_output_tokens
        self.speculation.add(request.stats)


class StepLock:
    """A lock that a thread holds during a step, or while it reads data that a step changes.

    Threads that add or abort requests do not wait for the lock: they queue the change, and the thread that holds the lock applies it.

    Args:
        drain: applies the queued changes. Called with the lock held, after it was acquired and before it is released.
        after_fork: called in a forked process before the lock is acquired there for the first time.
    """

    def __init__(self, drain: Callable[[], None], after_fork: Callable[[], None]) -> None:
        self._drain, self._after_fork = drain, after_fork
        self._lock = Lock()
        self._process_id = os.getpid()
        self._owner: int | None = None  # id of the thread that holds the lock
        self._is_drain_requested = False

    @property
    def is_held_by_this_thread(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == get_ident()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it.

        Raises:
            ConfigError: this thread holds it already, or the process was forked while another thread held it.
        """
        self._check_can_acquire()
        try:
            with self._lock:
                try:
                    self._owner = get_ident()
                    self._drain()
                    yield
                finally:
                    try:
                        self._drain()
                    finally:
                        self._owner = None
        finally:
            self._drain_if_requested()

    def request_drain(self) -> None:
        """Apply the queued changes. If another thread holds the lock, that thread applies them; this call never waits."""
        self._is_drain_requested = True
        self._drain_if_requested()

    def _drain_if_requested(self) -> None:
        """Apply the queued changes if the lock is free. `held` calls this after the release, for changes queued in the meantime."""
        while self._is_drain_requested and not self.is_held_by_this_thread and self._lock.acquire(blocking=False):
            try:
                self._owner, self._is_drain_requested = get_ident(), False
                self._drain()
            finally:
                self._owner = None
                self._lock.release()

    def _check_can_acquire(self) -> None:
        if self._process_id != os.getpid():
            if self._owner is not None:
                raise ConfigError("this process was forked while another thread used the model: load the model in each process")
            self._lock, self._process_id = Lock(), os.getpid()
            self._after_fork()
        if self.is_held_by_this_thread:
            raise ConfigError("the model was called from within its own step, by a processor or a drafter: call it from outside")


class Engine:
    """Runs requests on one target model. Several threads may call it; each step advances the requests of all threads.

    Args:
        runtime, cache: the target model and its KV cache.
        speculator: drafters and draft length policy.
        limits: limits of a pass.
    """

    def __init__(self, runtime: Network, cache: KVCache, speculator: Speculator, limits: SchedulerLimits) -> None:
        self.runtime, self.cache, self.speculator = runtime, cache, speculator
        blocks = BlockManager(cache, lambda request: self.speculator.preempt(request))
        self.scheduler = Scheduler(blocks, limits, self._is_ready)
        self.adapters = Adapters(runtime)
        self._stats = EngineStats()
        self._runs: dict[object, tuple[int, Sequence[EngineRequest]]] = {}  # for each unfinished `run`: thread id and requests
        self._lock = StepLock(self._apply_adds_and_aborts, self._abort_runs_of_other_threads)
        self._to_add: deque[EngineRequest] = deque()
        self._to_abort: deque[EngineRequest] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests, and no `run` or `keep_busy` is active."""
        return not self._runs and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether there are requests to advance."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._to_add)

    @property
    def stats(self) -> EngineStats:
        """A copy of the counters."""
        with nullcontext() if self._lock.is_held_by_this_thread else self.between_steps():
            stats = deepcopy(self._stats)
        stats.num_running, stats.num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        stats.num_preemptions, stats.num_mixture_passes = self.scheduler.num_preemptions, self.runtime.num_xlora_passes
        stats.drafter_failures = self.speculator.num_drafter_failures
        return stats

    @contextmanager
    def keep_busy(self) -> Iterator[None]:
        """Context manager: keep `is_idle` False while a caller prepares requests."""
        run = object()
        self._runs[run] = get_ident(), ()
        try:
            yield
        finally:
            self._runs.pop(run, None)

    def between_steps(self) -> AbstractContextManager[None]:
        """Context manager: keep other threads from running a step, so that the data of requests does not change while it is read.

        Raises:
            ConfigError: as for `step`.
        """
        return self._lock.held()

    def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, which new requests can then select. Running requests are not affected.

        Raises:
            ConfigError: the adapter's name is in use, or the adapter was made for another model.
            BackendUnavailableError: the target's runtime does not support adapters.
        """
        self.adapters.check_name_unused(adapter.name)
        number = self.runtime.load_adapter(adapter)
        try:
            with self.between_steps():
                self.adapters.add(adapter, number)
        except BaseException:
            self.runtime.unload_adapter(number)
            raise

    def remove_adapter(self, name: str) -> None:
        """Reject new requests for an adapter. The adapter is freed when no request uses it any more.

        Raises:
            ConfigError: no adapter has this name.
        """
        with self.between_steps():
            self.adapters.remove(name)

    def check_request(self, request: EngineRequest) -> None:
        """Check that a request can be served.

        Raises:
            CapacityError: the request needs more blocks than the cache has.
            RequestError: the request selects a drafter or an adapter that is not loaded.
        """
        if self._num_blocks_for(request) > self.cache.pool.num_blocks:
            num_cache_tokens, advice = self.cache.max_slots, "shorten the prompt, lower max_tokens or raise kv_cache_gb"
            if request.num_prompt_tokens < num_cache_tokens:
                raise CapacityError(f"prompt and output of {request.max_len} tokens do not fit the cache of {num_cache_tokens}: {advice}")
            explanation = f" (of the cache of {num_cache_tokens} tokens)"
            raise CapacityError(prompt_too_long_text(request.num_prompt_tokens, num_cache_tokens, advice, explanation=explanation))
        self.adapters.check_loaded(request.adapter)
        drafter, names = request.drafter, self.speculator.drafter_names
        if drafter is not None and drafter not in names:
            loaded = ", ".join(sorted(names)) or "none"
            raise RequestError(
                f"speculation.drafter is {drafter!r}, which is not loaded; loaded: {loaded}", parameter="speculation.drafter"
            )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a new request.

        Raises:
            CapacityError, RequestError: as for `check_request`; the request was not queued.
        """
        self.check_request(request)
        self._to_add.append(request)
        self._lock.request_drain()

    def abort_request(self, request: EngineRequest) -> None:
        """End a request that has not ended. If a step is running, the request ends after the step."""
        self._to_abort.append(request)
        self._lock.request_drain()

    def step(self) -> list[EngineRequest]:
        """Run one pass of the target for the requests that the scheduler chooses.

        An error of one request ends only that request and is stored in `Request.error`. An error of the whole pass ends all its requests.
        If Ctrl-C interrupts the target's pass, no request ends and the next step repeats the pass. If Ctrl-C interrupts other parts
        of the step, the requests of the pass end.

        Returns:
            the requests of the pass. Those that have finished are freed.

        Raises:
            ConfigError: called from within a step, or in a process that was forked during a step.
        """
        with self._lock.held():
            scheduled = self.scheduler.next_pass()
            if not scheduled:
                return self._fail_oldest_request()
            requests = list(scheduled)
            try:
                self._run_pass(requests, list(scheduled.values()))
            finally:
                for request in requests:
                    if request.is_finished and self.scheduler.remove(request):
                        self._release(request)
            return requests

    def run(self, requests: Sequence[EngineRequest]) -> Generator[None, None, None]:
        """Step until all of `requests` have finished, and yield after every step. Other requests advance as well.

        When the generator ends, is closed or raises, all of `requests` are freed.

        Raises:
            CapacityError: one of the requests needs more blocks than the cache has; no request was started.
            PacelineError: the error of the first request that failed.
        """
        run = object()
        self._runs[run] = get_ident(), requests
        try:
            for request in requests:
                self.check_request(request)
            for request in requests:
                self.add_request(request)
            while not all(request.is_released for request in requests):
                self._runs[run] = get_ident(), requests
                self.step()
                raise_first_error(requests)
                yield
            raise_first_error(requests)
        finally:
            self._runs.pop(run, None)
            for request in requests:
                self.abort_request(request)

    def _apply_adds_and_aborts(self) -> None:
        while self._to_add:
            request = self._to_add.popleft()
            request.stats.acceptance = self.speculator.acceptance.value
            try:
                self.adapters.acquire(request)
            except RequestError as error:  # the adapter was removed after `check_request`
                request.fail(error)
            request.cached_sequence = self.cache.new_sequence(request.prefix_salt)
            if request.is_finished:
                self._release(request)
            else:
                self.scheduler.add(request)
        while self._to_abort:
            request = self._to_abort.popleft()
            if self.scheduler.remove(request):
                if not request.is_finished:
                    request.finish_reason = FinishReason.ABORT
                self._release(request)

    def _abort_runs_of_other_threads(self) -> None:
        """In a forked process, abort the requests of threads that exist only in the parent process."""
        for run, (thread, requests) in list(self._runs.items()):
            if thread != get_ident():
                del self._runs[run]
                self._to_abort.extend(requests)

    def _run_pass(self, requests: Sequence[EngineRequest], num_rows: Sequence[int]) -> None:
        now = time.perf_counter()
        for request in requests:
            if not request.started_s:
                request.started_s = now
        self._stats.num_steps += 1
        num_before = [len(request.token_ids) for request in requests]
        try:
            step(requests, num_rows, self.runtime, self.cache, self.speculator, max_rows=self.scheduler.limits.max_num_batched_tokens)
        except PassInterrupted as error:  # requests and cache are as before the pass
            raise error.__cause__ or error from None
        except BaseException as error:
            if not is_interrupt(error):
                self._fail_pass(requests, as_exception(error))
                return
            # Outside the target's pass, the interrupt may have come after only some of the step's changes, so the step cannot be repeated.
            self._fail_pass(requests, PacelineError(f"the pass was interrupted ({type(error).__name__}); send the request again"))
            raise
        now = time.perf_counter()
        for request, num_tokens in zip(requests, num_before, strict=True):
            if len(request.token_ids) == num_tokens:
                continue
            if request.first_token_s:
                self._stats.inter_token_latency.add(now - request.last_token_s)
            else:
                request.first_token_s = now
            request.last_token_s = now

    def _fail_pass(self, requests: Sequence[EngineRequest], error: Exception) -> None:
        """End the requests of a pass that failed as a whole. If the cache had too few free blocks, preempt the youngest request instead."""
        for request in requests:
            self.cache.drop_reserved_rows(request.cached_sequence)
        if isinstance(error, CapacityError) and len(self.scheduler.running) > 1:
            self.scheduler.preempt(self.scheduler.running[-1])
            return
        for request in requests:
            request.fail(error)

    def _fail_oldest_request(self) -> list[EngineRequest]:
        """End the oldest request with an error: its rows do not fit in the cache, and no other request has blocks to free."""
        if not self.has_work:
            return []
        request = (self.scheduler.running or self.scheduler.waiting)[0]
        self.scheduler.remove(request)
        num_rows = request.num_next_tokens(self.scheduler.limits.prefill_chunk_size)
        pool = self.cache.pool
        free = f"{pool.num_free} of {pool.num_blocks} blocks are free and none can be freed"
        request.fail(CapacityError(f"{num_rows} rows of a request do not fit in the cache: {free}; raise kv_cache_gb"))
        self._release(request)
        return [request]

    def _is_ready(self, request: EngineRequest) -> bool:
        """Return whether a request may start. Further samples of a prompt wait until the first sample has computed the prompt's rows."""
        first_sample = request.first_sample
        if first_sample is None or first_sample.is_finished:
            return True
        return not self.cache.prefix_caching or first_sample.cached_sequence.committed_len >= first_sample.num_prompt_tokens

    def _num_blocks_for(self, request: EngineRequest) -> int:
        return num_blocks_for(request.max_len, self.cache.block_size)

    def _release(self, request: EngineRequest) -> None:
        """Update the counters for a request that was removed from the scheduler, and free its resources."""
        request.finished_s = time.perf_counter()
        request.first_sample = None
        self._stats.count_request(request)
        self.adapters.release(request)
        self.cache.release_sequence(request.cached_sequence)
        self.speculator.release(request)
        request.drafter_states.clear()  # the caller may keep the request object


def raise_first_error(requests: Sequence[EngineRequest]) -> None:
    """Raise the error of the first request that failed."""
    for request in requests:
        if request.error is not None:
            raise request.error
