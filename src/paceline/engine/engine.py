"""Runs many requests on one target: adds, steps, aborts, and frees everything however a request ends."""

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
from paceline.errors import CapacityError, ConfigError, PacelineError, RequestError, as_exception, is_interrupt, prompt_too_long
from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.row_plan import blocks_for
from paceline.models.adapters.adapter import Adapter
from paceline.runtimes.base import Network
from paceline.speculation.request import FinishReason
from paceline.speculation.speculator import Speculator
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step import PassInterrupted, step

LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histogram's buckets; one more has no bound."""


@dataclass(slots=True)
class InterTokenLatency:
    """Histogram of the times between two steps that gave a request tokens. The tokens of one step count as one."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, latency_s: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS_S, latency_s)] += 1
        self.total_s += latency_s


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made. Tokens and speculation are those of requests that ended without an error.

    Attributes:
        num_steps: passes of the target, prefill chunks included. A scaling pass is not counted here.
        num_mixture_passes: additional passes for rows of X-LoRA adapters.
        num_preemptions: how often a request's rows were dropped to make room, and computed again.
        num_finished, num_aborted, num_failed: requests by how they ended.
        num_running, num_waiting: requests now.
        prompt_tokens, num_cached_tokens, completion_tokens: `num_cached_tokens` are the prompt tokens of prefix hits.
        drafter_failures: how often a drafter raised or returned an invalid draft; the step was plain.
        inter_token_latency: histogram over all requests.
        speculation: statistics of speculation over all requests.
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
        """Return the JSON form."""
        return {**asdict(self), "speculation": self.speculation.as_dict()}

    def count(self, request: EngineRequest) -> None:
        """Count a request that has ended."""
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
    """Serialises steps: one thread holds it to step, or to read what a step changes. Other threads put their changes into queues.

    Args:
        drain: applies the queues. Called with the lock held, after it was acquired and before it is released.
        after_fork: called in a forked process before the lock is acquired there for the first time.
    """

    def __init__(self, drain: Callable[[], None], after_fork: Callable[[], None]) -> None:
        self._drain, self._after_fork = drain, after_fork
        self._lock = Lock()
        self._process_id = os.getpid()
        self._owner: int | None = None  # the thread that holds it
        self._is_drain_due = False

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
        self._check()
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
            self._drain_if_due()

    def request_drain(self) -> None:
        """Apply the queued changes now, or let the thread that holds the lock do it; never wait."""
        self._is_drain_due = True
        self._drain_if_due()

    def _drain_if_due(self) -> None:
        """Apply the queued changes if the lock is free. A thread that holds it calls this after releasing it."""
        while self._is_drain_due and not self.is_held_by_this_thread and self._lock.acquire(blocking=False):
            try:
                self._owner, self._is_drain_due = get_ident(), False
                self._drain()
            finally:
                self._owner = None
                self._lock.release()

    def _check(self) -> None:
        if self._process_id != os.getpid():
            if self._owner is not None:
                raise ConfigError("this process was forked while another thread used the model: load the model in each process")
            self._lock, self._process_id = Lock(), os.getpid()
            self._after_fork()
        if self.is_held_by_this_thread:
            raise ConfigError("the model was called from within its own step, by a processor or a drafter: call it from outside")


class Engine:
    """Scheduler and step loop of one target. Several threads may use it: each step advances the requests of all.

    Args:
        runtime, cache: the target.
        speculator: drafters and draft length policy.
        limits: limits of a pass.
    """

    def __init__(self, runtime: Network, cache: KVCache, speculator: Speculator, limits: SchedulerLimits) -> None:
        self.runtime, self.cache, self.speculator = runtime, cache, speculator
        blocks = BlockManager(cache, lambda request: self.speculator.preempt(request))
        self.scheduler = Scheduler(blocks, limits, self._is_ready)
        self.adapters = Adapters(runtime)
        self._stats = EngineStats()
        self._runs: dict[object, tuple[int, Sequence[EngineRequest]]] = {}  # per open `run`, the thread of its last step and its requests
        self._lock = StepLock(self._apply_adds_and_aborts, self._abort_runs_of_other_threads)
        self._to_add: deque[EngineRequest] = deque()
        self._to_abort: deque[EngineRequest] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, no open `run`, and no caller in `held`."""
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
        stats.drafter_failures = self.speculator.num_failures
        return stats

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context manager: keep the engine from being idle while a caller prepares requests."""
        run = object()
        self._runs[run] = get_ident(), ()
        try:
            yield
        finally:
            self._runs.pop(run, None)

    def between_steps(self) -> AbstractContextManager[None]:
        """Keep other threads from stepping, to read the state of requests.

        Raises:
            ConfigError: as `step`.
        """
        return self._lock.held()

    def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter for requests to come, while others run.

        Raises:
            ConfigError: its name is in use, or it does not fit the target.
            BackendUnavailableError: the target's runtime runs no adapters.
        """
        self.adapters.check_free(adapter.name)
        number = self.runtime.load_adapter(adapter)
        try:
            with self.between_steps():
                self.adapters.add(adapter, number)
        except BaseException:
            self.runtime.unload_adapter(number)
            raise

    def remove_adapter(self, name: str) -> None:
        """Reject requests for an adapter from now on. It is freed when the last request that uses it has ended.

        Raises:
            ConfigError: there is none of this name.
        """
        with self.between_steps():
            self.adapters.remove(name)

    def check(self, request: EngineRequest) -> None:
        """Check that a request can be served at all.

        Raises:
            CapacityError: it needs more blocks than the cache has.
            RequestError: it names a drafter or an adapter that is not loaded.
        """
        if self._blocks_of(request) > self.cache.pool.num_blocks:
            raise CapacityError(self._too_long(request))
        self.adapters.check_known(request.adapter)
        drafter, names = request.drafter, self.speculator.drafter_names
        if drafter is not None and drafter not in names:
            loaded = ", ".join(sorted(names)) or "none"
            raise RequestError(
                f"speculation.drafter is {drafter!r}, which is not loaded; loaded: {loaded}", parameter="speculation.drafter"
            )

    def add(self, request: EngineRequest) -> None:
        """Queue a new request.

        Raises:
            CapacityError, RequestError: as `check`; nothing was changed.
        """
        self.check(request)
        self._to_add.append(request)
        self._lock.request_drain()

    def abort(self, request: EngineRequest) -> None:
        """End a request that has not ended; at the end of the step if a thread is stepping."""
        self._to_abort.append(request)
        self._lock.request_drain()

    def step(self) -> list[EngineRequest]:
        """Advance the scheduled requests by one pass.

        An error of one request ends that request, with `Request.error`. A pass that fails as a whole ends the requests in it. An interrupt
        within the target's pass ends none, and the next step repeats it; elsewhere it ends the requests of the pass.

        Returns:
            the requests of the pass; those that have finished are freed.

        Raises:
            ConfigError: called from within a step, or in a process that was forked within one.
        """
        with self._lock.held():
            scheduled = self.scheduler.next_pass()
            if not scheduled:
                return self._fail_oldest()
            requests = [one.request for one in scheduled]
            try:
                self._step(requests, [one.num_rows for one in scheduled])
            finally:
                for request in requests:
                    if request.is_finished and self.scheduler.remove(request):  # first, so that it is freed once even if that raises
                        self._release(request)
            return requests

    def run(self, requests: Sequence[EngineRequest]) -> Generator[None, None, None]:
        """Step until all of `requests` have finished, and yield after every step; other requests advance as well.

        All are freed when the iterator ends, is closed or raises.

        Raises:
            CapacityError: one of the requests needs more blocks than the cache has; nothing ran.
            PacelineError: the error of the first request that failed.
        """
        run = object()
        self._runs[run] = get_ident(), requests
        try:
            for request in requests:
                self.check(request)
            for request in requests:
                self.add(request)
            while not all(request.is_released for request in requests):
                self._runs[run] = get_ident(), requests
                self.step()
                raise_error(requests)
                yield
            raise_error(requests)
        finally:
            self._runs.pop(run, None)
            for request in requests:
                self.abort(request)

    def _apply_adds_and_aborts(self) -> None:
        while self._to_add:
            request = self._to_add.popleft()
            request.stats.acceptance = self.speculator.acceptance.value
            try:
                self.adapters.hold(request)
            except RequestError as error:  # the request's adapter was removed after `check`
                request.fail(error)
            request.sequence = self.cache.new_sequence(request.prefix_salt)
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
        """Abort requests of threads that do not exist in a forked process."""
        for run, (thread, requests) in list(self._runs.items()):
            if thread != get_ident():
                del self._runs[run]
                self._to_abort.extend(requests)

    def _step(self, requests: Sequence[EngineRequest], num_rows: Sequence[int]) -> None:
        now = time.perf_counter()
        for request in requests:
            if not request.started_s:
                request.started_s = now
        self._stats.num_steps += 1
        num_before = [len(request.token_ids) for request in requests]
        try:
            step(requests, num_rows, self.runtime, self.cache, self.speculator, max_rows=self.scheduler.limits.max_num_batched_tokens)
        except PassInterrupted as error:  # nothing was changed
            raise error.__cause__ or error from None
        except BaseException as error:
            if not is_interrupt(error):
                self._fail_pass(requests, as_exception(error))
                return
            # an interrupt outside the pass may have left the step half done
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
        """End the requests of a pass that failed as a whole. If blocks were lacking, preempt the youngest request instead."""
        for request in requests:
            self.cache.cancel(request.sequence)
        if isinstance(error, CapacityError) and len(self.scheduler.running) > 1:
            self.scheduler.preempt(self.scheduler.running[-1])
            return
        for request in requests:
            request.fail(error)

    def _fail_oldest(self) -> list[EngineRequest]:
        """End the oldest request: nothing fits although no other request owns blocks, so a caller outside the engine must own them."""
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
        """Return whether a request may start. Further samples of a prompt wait until the first one's rows are cached."""
        leader = request.leader
        if leader is None or leader.is_finished:
            return True
        return not self.cache.prefix_caching or leader.sequence.committed_len >= leader.num_prompt_tokens

    def _blocks_of(self, request: EngineRequest) -> int:
        return blocks_for(request.max_len, self.cache.block_size)

    def _too_long(self, request: EngineRequest) -> str:
        size, way_out = self.cache.max_slots, "shorten the prompt, lower max_tokens or raise kv_cache_gb"
        if request.num_prompt_tokens < size:
            return f"prompt and output of {request.max_len} tokens do not fit the cache of {size} tokens: {way_out}"
        return prompt_too_long(request.num_prompt_tokens, size, way_out, why=f" (of the cache of {size} tokens)")

    def _release(self, request: EngineRequest) -> None:
        """Count a request that is out of the scheduler, and free what it holds."""
        request.finished_s = time.perf_counter()
        request.leader = None
        self._stats.count(request)
        self.adapters.release(request)
        self.cache.release(request.sequence)
        self.speculator.release(request)
        request.drafting.clear()  # free drafter state, because the caller may keep the request object


def raise_error(requests: Sequence[EngineRequest]) -> None:
    """Raise the error of the first request that failed."""
    for request in requests:
        if request.error is not None:
            raise request.error
