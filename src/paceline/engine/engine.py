"""Many requests on one target: steps until all are finished, and giving everything back however a request ends."""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from threading import get_ident
from typing import Any

from paceline.engine.adapters import Adapters
from paceline.engine.scheduler import Limits, Scheduler
from paceline.engine.step_lock import StepLock
from paceline.engine.token_gaps import TokenGaps
from paceline.errors import CapacityError, PacelineError, RequestError, as_exception, is_interrupt, prompt_too_long
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import blocks_for
from paceline.models.adapters.adapter import Adapter
from paceline.runtimes.base import Network
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.speculator import Speculator
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step import PassInterrupted, step


@dataclass(slots=True)
class EngineStats:
    """What an engine did since it was made. Tokens and speculation are those of requests that ended without an error.

    Attributes:
        num_steps: passes of the target, prompt chunks included; a scaling pass is part of the one it is for.
        num_mixture_passes: extra passes, before those with rows whose adapter is a mixture.
        num_preemptions: how often a request's rows were dropped to make room; they ran again.
        num_finished, num_aborted, num_failed: requests by how they ended.
        num_running, num_waiting: now.
        prompt_tokens, num_cached_tokens, completion_tokens: `num_cached_tokens` are those prompt tokens whose rows were in the cache.
        drafter_failures: how often the drafter raised or answered nonsense; the steps were plain.
        token_gaps: times between the steps that gave a request tokens, of all requests together.
        speculation: counters of all requests together.
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
    token_gaps: TokenGaps = field(default_factory=TokenGaps)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {**asdict(self), "speculation": self.speculation.as_dict()}


class CacheBlocks:
    """The scheduler's `BlockManager`: the target's cache, and the drafter's where rows are dropped."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine

    @property
    def num_free(self) -> int:
        return self._engine.cache.pool.num_free

    def num_needed(self, request: Request, num_rows: int) -> int:
        return self._engine.cache.num_needed(request.sequence, range(-1, num_rows - 1))

    def count_prefix(self, request: Request) -> int:
        return 0 if request.wants_prompt_rows else self._engine.cache.count_prefix(request.sequence, request.token_ids)

    def adopt_prefix(self, request: Request) -> None:
        if request.wants_prompt_rows:
            return
        num_cached = self._engine.cache.adopt_prefix(request.sequence, request.token_ids)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached

    def return_prefix(self, request: Request) -> None:
        self._engine.cache.return_prefix(request.sequence)

    def free(self, request: Request) -> None:
        cache = self._engine.cache
        if request.started_s:  # it ran before, so a drafter may know it
            self._engine.speculator.preempt(request)
            request.num_preemptions += 1
        cache.release(request.sequence)
        request.sequence = cache.new_sequence(request.prefix_salt)


class Engine:
    """Runs requests to their end, as many at once as fit.

    Several threads may use it: a step of one waits for the step under way and advances the requests of all.

    Args:
        runtime, cache: the target.
        speculator: drafter and policy.
        limits: what a pass may hold.
    """

    def __init__(self, runtime: Network, cache: KVCache, speculator: Speculator, limits: Limits) -> None:
        self.runtime, self.cache, self.speculator = runtime, cache, speculator
        self.scheduler: Scheduler[Request] = Scheduler(CacheBlocks(self), limits, self._is_ready)
        self.adapters = Adapters(runtime)
        self._stats = EngineStats()
        self._runs: dict[object, tuple[int, Sequence[Request]]] = {}  # the thread that stepped for it last, its requests
        self._lock = StepLock(self._apply_adds_and_aborts, self._abort_runs_of_other_threads)
        self._to_add: deque[Request] = deque()
        self._to_abort: deque[Request] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, no open run and no `held`."""
        return not self._runs and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._to_add)

    @property
    def stats(self) -> EngineStats:
        """Counters so far, and the requests of now; a copy."""
        with nullcontext() if self._lock.is_mine else self.between_steps():
            stats = deepcopy(self._stats)
        stats.num_running, stats.num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        stats.num_preemptions, stats.num_mixture_passes = self.scheduler.num_preemptions, self.runtime.num_mixture_passes
        stats.drafter_failures = self.speculator.num_failures
        return stats

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the engine from being idle, for a caller about to run requests."""
        run = object()
        self._runs[run] = get_ident(), ()
        try:
            yield
        finally:
            self._runs.pop(run, None)

    def between_steps(self) -> AbstractContextManager[None]:
        """While this is held no other thread steps, so that what requests hold can be read.

        Raises:
            ConfigError: as `step`.
        """
        return self._lock.held()

    def add_adapter(self, adapter: Adapter) -> None:
        """Let requests ask for an adapter from now on; others go on meanwhile.

        Raises:
            ConfigError: one of its name is there, or it does not fit the target.
            BackendUnavailableError: the target's runtime runs no adapters.
        """
        self.adapters.check_free(adapter.name)
        number = self.runtime.load_adapter(adapter)
        try:
            with self.between_steps():
                self.adapters.put(adapter, number)
        except BaseException:
            self.runtime.unload_adapter(number)
            raise

    def remove_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on; those that are here end with it, then it is freed.

        Raises:
            ConfigError: there is none of this name.
        """
        with self.between_steps():
            self.adapters.remove(name)

    def check(self, request: Request) -> None:
        """Whether a request can be served at all.

        Raises:
            CapacityError: it alone is larger than the cache.
            RequestError: it asks for a drafter or an adapter that is not loaded.
        """
        if self._blocks_of(request) > self.cache.pool.num_blocks:
            raise CapacityError(self._too_long(request))
        self.adapters.check_known(request.adapter)
        wanted = request.speculation.drafter
        names = self.speculator.drafter_names
        if wanted is not None and wanted not in names:
            loaded = ", ".join(sorted(names)) or "none"
            raise RequestError(f"speculation.drafter is {wanted!r}, which is not loaded; loaded: {loaded}", parameter="speculation.drafter")

    def _too_long(self, request: Request) -> str:
        size, way_out = self.cache.max_slots, "shorten the prompt, lower max_tokens or raise kv_cache_gb"
        if request.num_prompt_tokens < size:
            return f"prompt and output of {request.max_len} tokens do not fit the cache of {size} tokens: {way_out}"
        return prompt_too_long(request.num_prompt_tokens, size, way_out, why=f" (of the cache of {size} tokens)")

    def add(self, request: Request) -> None:
        """Queue a new request; its blocks are given back when it ends.

        Raises:
            CapacityError, RequestError: as `check`; nothing was changed.
        """
        self.check(request)
        self._to_add.append(request)
        self._lock.request_drain()

    def abort(self, request: Request) -> None:
        """End a request; nothing happens where it has ended. While a thread steps, it ends with the step."""
        self._to_abort.append(request)
        self._lock.request_drain()

    def step(self) -> list[Request]:
        """Advance the requests that can run by one pass.

        What goes wrong with one request ends this one alone, with `Request.error`; a pass that fails as a whole ends those in it. An
        interrupt within the target's pass ends none: the next step does the same again. Elsewhere in a step it ends those in it.

        Returns:
            those that took part; the finished ones among them are released.

        Raises:
            ConfigError: it is called from within a step, or in a process that was forked within one.
        """
        with self._lock.held():
            scheduled = self.scheduler.next_pass()
            if not scheduled:
                return self._fail_oldest()
            picked = [one.request for one in scheduled]
            try:
                self._step(picked, [one.num_rows for one in scheduled])
            finally:
                for request in picked:
                    if request.is_finished and self.scheduler.remove(request):  # first, so that it is released once even if that raises
                        self._release(request)
            return picked

    def _apply_adds_and_aborts(self) -> None:
        """Do what `add` and `abort` left in their queues."""
        while self._to_add:
            request = self._to_add.popleft()
            request.stats.acceptance = self.speculator.acceptance.value
            try:
                self.adapters.hold(request)
            except RequestError as error:  # its adapter was removed since it was checked
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

    def run(self, requests: Sequence[Request]) -> Generator[None, None, None]:
        """Advance until all of `requests` are finished, yielding after every step; others that are here advance as well.

        All are released when the iterator ends, breaks off or raises.

        Raises:
            CapacityError: one request alone is larger than the cache; nothing ran.
            PacelineError: what the first of them that failed failed with.
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
                self._raise_error(requests)
                yield
            self._raise_error(requests)
        finally:
            self._runs.pop(run, None)
            for request in requests:
                self.abort(request)

    def _abort_runs_of_other_threads(self) -> None:
        """In a forked process the other threads do not exist, so none waits for their requests."""
        for run, (thread, requests) in list(self._runs.items()):
            if thread != get_ident():
                del self._runs[run]
                self._to_abort.extend(requests)

    def _step(self, picked: Sequence[Request], num_rows: Sequence[int]) -> None:
        now = time.perf_counter()
        for request in picked:
            if not request.started_s:
                request.started_s = now
        self._stats.num_steps += 1
        num_before = [len(request.token_ids) for request in picked]
        try:
            step(picked, num_rows, self.runtime, self.cache, self.speculator, max_rows=self.scheduler.limits.max_num_batched_tokens)
        except PassInterrupted as error:  # nothing was changed
            raise error.__cause__ or error from None
        except BaseException as error:
            if not is_interrupt(error):
                self._fail_pass(picked, as_exception(error))
                return
            # outside of the pass it is not known how far the step came
            self._fail_pass(picked, PacelineError(f"the pass was interrupted ({type(error).__name__}); send the request again"))
            raise
        now = time.perf_counter()
        for request, num_tokens in zip(picked, num_before, strict=True):
            if len(request.token_ids) == num_tokens:
                continue
            if request.first_token_s:
                self._stats.token_gaps.add(now - request.last_token_s)
            else:
                request.first_token_s = now
            request.last_token_s = now

    def _fail_pass(self, picked: Sequence[Request], error: Exception) -> None:
        """A pass that failed as a whole ends those in it; if it was for want of blocks, one of them makes room."""
        for request in picked:
            self.cache.cancel(request.sequence)
        if isinstance(error, CapacityError) and len(self.scheduler.running) > 1:
            self.scheduler.preempt(self.scheduler.running[-1])
            return
        for request in picked:
            request.fail(error)

    def _fail_oldest(self) -> list[Request]:
        """Nothing fits although at most one request holds blocks: something else than this engine's requests must hold them."""
        if not self.has_work:
            return []
        request = (self.scheduler.running or self.scheduler.waiting)[0]
        self.scheduler.remove(request)
        num_rows = request.num_next_tokens(self.scheduler.limits.prefill_chunk_size)
        request.fail(
            CapacityError(
                f"{num_rows} rows of a request found no room: {self.cache.pool.num_free} of "
                f"{self.cache.pool.num_blocks} blocks are free and none can be made free; raise kv_cache_gb"
            )
        )
        self._release(request)
        return [request]

    def _is_ready(self, request: Request) -> bool:
        """Whether a request may begin: further samples of a prompt wait until the first one's rows can be adopted."""
        leader = request.leader
        if leader is None or leader.is_finished:
            return True
        return not self.cache.prefix_caching or leader.sequence.committed_len >= leader.num_prompt_tokens

    def _blocks_of(self, request: Request) -> int:
        return blocks_for(request.max_len, self.cache.block_size)

    def _raise_error(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.error is not None:
                raise request.error

    def _release(self, request: Request) -> None:
        """Give back what a request holds and count it; it is out of the scheduler."""
        request.finished_s = time.perf_counter()
        request.leader = None
        self._count(request)
        self.adapters.release(request)
        self.cache.release(request.sequence)
        self.speculator.release(request)
        request.drafting.clear()  # its caller may keep it for long

    def _count(self, request: Request) -> None:
        stats = self._stats
        if request.error is not None:
            stats.num_failed += 1
            return
        if request.finish_reason is FinishReason.ABORT:
            stats.num_aborted += 1
        else:
            stats.num_finished += 1
        stats.prompt_tokens += request.num_prompt_tokens
        stats.num_cached_tokens += request.num_cached_tokens
        stats.completion_tokens += request.num_output_tokens
        stats.speculation.add(request.stats)
