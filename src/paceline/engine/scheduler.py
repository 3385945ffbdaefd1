"""Chooses the requests of the next pass, by numbers of rows and blocks only.

    waiting   in order of arrival; a preempted request keeps its position
    running   in order of arrival; these own blocks of the cache

**Rows.** Each decoding request has one row in every pass. Prompts share `prefill_chunk_size` further rows: half of these go to the oldest
prompts (FIFO), the other half to the prompts with the fewest tokens left (shortest remaining processing time).

**Blocks.** A waiting request starts when the rows of its first pass fit in the cache. If the next rows of a running request do not fit, the
youngest one is preempted: its rows are dropped and computed again later. Only younger requests are preempted for older ones, and a request
that lacks blocks is overtaken at most `MAX_OVERTAKEN` times. So every request finishes.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from paceline.engine.request import EngineRequest
from paceline.kv_cache.cache import KVCache

MAX_OVERTAKEN = 16
"""Younger requests that may start while an older one lacks blocks. After that free blocks are kept for the older one."""


class BlockManager:
    """Cache blocks by request.

    Args:
        on_preempt: called with a request whose rows are dropped after it has run.
    """

    def __init__(self, cache: KVCache, on_preempt: Callable[[EngineRequest], None]) -> None:
        self._cache, self._on_preempt = cache, on_preempt

    @property
    def num_free(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return self._cache.pool.num_free

    def num_blocks_needed(self, request: EngineRequest, num_rows: int) -> int:
        """Return the number of blocks to allocate for the next `num_rows` rows."""
        return self._cache.num_blocks_needed(request.sequence, range(-1, num_rows - 1))

    def cached_prefix_len(self, request: EngineRequest) -> int:
        """Return the number of rows that `match_prefix` would find now."""
        return 0 if request.needs_prompt_logits else self._cache.cached_prefix_len(request.sequence, request.token_ids)

    def match_prefix(self, request: EngineRequest) -> None:
        """Start a request without rows from the cached prefix of its tokens."""
        if request.needs_prompt_logits:
            return
        num_cached = self._cache.match_prefix(request.sequence, request.token_ids)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached

    def release_prefix(self, request: EngineRequest) -> None:
        """Undo `match_prefix`, because there are no blocks for the rest of the pass."""
        self._cache.release_prefix(request.sequence)

    def free_blocks(self, request: EngineRequest) -> None:
        """Free all blocks of a preempted request."""
        if request.started_s:
            self._on_preempt(request)
            request.num_preemptions += 1
        self._cache.release(request.sequence)
        request.sequence = self._cache.new_sequence(request.prefix_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """SchedulerLimits of a pass.

    Attributes:
        max_num_seqs: running requests.
        max_num_batched_tokens: rows of a pass, drafts included.
        prefill_chunk_size: prompt rows of a pass, of all requests together.
        spare_blocks: blocks left free for each running request when another one starts, so that it is not preempted at once.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefill_chunk_size: int = 256
    spare_blocks: int = 1

    @property
    def max_running(self) -> int:
        """Maximum number of running requests. Each needs a row of the pass."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_unfinished_prompts(self) -> int:
        """Maximum number of running requests whose prompts need further passes. The others are left to short prompts."""
        return max(1, self.max_running // 2)


class ScheduledRequest(NamedTuple):
    """A request of the next pass, and the number of its tokens that run in it."""

    request: EngineRequest
    num_rows: int


@dataclass(slots=True)
class _Entry:
    """The scheduler's data of a request.

    Attributes:
        arrival: its number in order of arrival.
        num_uncached: tokens to compute, as of when it was queued.
        is_counted: whether `num_uncached` excludes its cached prefix. False until the request is ready.
        refusal: (running requests, free blocks) when it last did not fit in the cache; None = it was not refused.
        num_overtaken: younger requests that started while it lacked blocks.
    """

    arrival: int
    num_uncached: int = 0
    is_counted: bool = False
    refusal: tuple[int, int] | None = None
    num_overtaken: int = 0


def share_rows(num_uncached: Sequence[int], max_rows: Sequence[int], row_budget: int) -> list[int]:
    """Share the prompt rows of a pass: half to the oldest prompts, the rest to those with the fewest tokens left.

    Args:
        num_uncached: tokens left of each prompt, the oldest prompt first.
        max_rows: most rows that each prompt can use.

    Returns:
        rows of each prompt; in total `row_budget`, or the sum of `max_rows` if that is less.
    """
    shares = [0] * len(max_rows)
    rows_left = _fill_shares(range(len(shares)), shares, max_rows, row_budget - row_budget // 2)
    by_length = sorted(range(len(shares)), key=lambda index: num_uncached[index] - shares[index])
    _fill_shares(by_length, shares, max_rows, rows_left + row_budget // 2)
    return shares


def _fill_shares(order: Iterable[int], shares: list[int], max_rows: Sequence[int], rows_left: int) -> int:
    """Raise each prompt's share of rows to its maximum, in order, while rows are left; return the number left."""
    for index in order:
        more = min(max_rows[index] - shares[index], rows_left)
        shares[index] += more
        rows_left -= more
    return rows_left


class Scheduler:
    """Chooses the requests of each pass.

    Args:
        is_ready: whether a waiting request may start; others overtake it until it may.

    Attributes:
        num_preemptions: how often a request was preempted.
    """

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits, is_ready: Callable[[EngineRequest], bool] = lambda _: True) -> None:
        self.limits = limits
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.num_preemptions = 0
        self._blocks, self._is_ready = blocks, is_ready
        self._shortest: list[EngineRequest] = []  # waiting requests, the one with the fewest tokens to compute first
        self._entries: dict[EngineRequest, _Entry] = {}
        self._num_arrived = 0

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self._entries[request] = _Entry(self._num_arrived)
        self._num_arrived += 1
        self._queue(request)

    def remove(self, request: EngineRequest) -> bool:
        """Remove a request, waiting or running; the caller frees its blocks. Return False if it is not here."""
        if request not in self._entries:
            return False
        if request in self.running:
            self.running.remove(request)
        else:
            self._unqueue(request)
        del self._entries[request]
        return True

    def preempt(self, request: EngineRequest) -> None:
        """Drop a running request's rows and queue it again, at its position by arrival."""
        self.running.remove(request)
        self._blocks.free_blocks(request)
        self._queue(request)
        self.num_preemptions += 1

    def next_pass(self) -> list[ScheduledRequest]:
        """Choose the requests of the next pass, oldest first. Empty only if not even a single request fits."""
        decoding = {request for request in self.running if request.num_uncached == 1}
        row_budget = max(0, min(self.limits.prefill_chunk_size, self.limits.max_num_batched_tokens - len(decoding)))
        if self.waiting and row_budget > 0 and len(self.running) < self.limits.max_running:
            self._start_requests(decoding, row_budget)
        prompts = [request for request in self.running if request not in decoding]
        num_rows = dict.fromkeys(decoding, 1) | dict(zip(prompts, self._share_prefill_rows(prompts, row_budget), strict=True))
        return self._claim_blocks(num_rows)

    def _claim_blocks(self, num_rows: dict[EngineRequest, int]) -> list[ScheduledRequest]:
        """Choose the running requests whose rows fit in the cache, oldest first. Younger ones are preempted to make room."""
        picked: list[ScheduledRequest] = []
        reserved = index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            due = request.num_next_tokens(num_rows[request])
            if due == 0:
                continue
            needed = self._blocks.num_blocks_needed(request, due)
            if needed > 0 and not self._preempt_until_free(needed + reserved, index):
                continue  # the request keeps its rows, which an older one may preempt
            picked.append(ScheduledRequest(request, due))
            reserved += needed
        return picked

    def _preempt_until_free(self, wanted: int, first: int) -> bool:
        """Preempt requests from index `first` on, the youngest first, until `wanted` blocks are free; return whether they are."""
        while self._blocks.num_free < wanted:
            if first == len(self.running):
                return False
            self.preempt(self.running[-1])
        return True

    def _start_requests(self, decoding: set[EngineRequest], row_budget: int) -> None:
        """Start waiting requests that would get rows of the pass, oldest first, while blocks are free and the limit allows."""
        reserved = sum(self._blocks.num_blocks_needed(request, request.num_next_tokens(row_budget)) for request in self.running)
        if reserved > self._blocks.num_free:
            return  # free blocks are left to running requests that lack some
        candidates, lacking = self._candidates()
        while candidates and len(self.running) < self.limits.max_running:
            running = [request for request in self.running if request not in decoding]
            prompts = sorted([*running, *candidates], key=self._arrival)
            shares = dict(zip(prompts, self._share_prefill_rows(prompts, row_budget), strict=True))
            request = next((one for one in candidates if shares[one] > 0), None)
            if request is None:
                return
            candidates.remove(request)
            num_unfinished = sum(shares[one] < one.num_uncached for one in running)
            if shares[request] < self._num_uncached(request) and num_unfinished >= self.limits.max_unfinished_prompts:
                continue
            needed = self._start_request(request, row_budget, reserved)
            if needed is None:
                insort(lacking, request, key=self._arrival)
            else:
                reserved += needed
                self._count_overtaking(request, lacking)
            candidates = self._startable_candidates(candidates, lacking)

    def _candidates(self) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """Return waiting requests that may start, and older ones that still lack blocks, both oldest first.

        Of a long queue only the oldest and the shortest are considered, as many of each as can run at a time.
        """
        lacking: list[EngineRequest] = []
        oldest: list[EngineRequest] = []
        for request in list(self.waiting):
            if len(oldest) == self.limits.max_running:
                break
            if self._still_lacks_blocks(request):
                lacking.append(request)
                if self._entries[request].num_overtaken >= MAX_OVERTAKEN:
                    break
            elif self._is_ready(request):
                oldest.append(request)
                if not self._entries[request].is_counted:  # a further sample of a prompt, whose rows are cached by the first one
                    self._unqueue(request)
                    self._queue(request)
        may_start = (one for one in self._shortest if not self._still_lacks_blocks(one) and self._is_ready(one))
        chosen = {*oldest, *islice(may_start, self.limits.max_running)}
        return self._startable_candidates(sorted(chosen, key=self._arrival), lacking), lacking

    def _start_request(self, request: EngineRequest, row_budget: int, reserved: int) -> int | None:
        """Start a waiting request; return the number of blocks of its first pass, None if there are too few."""
        num_free = self._blocks.num_free
        self._blocks.match_prefix(request)
        needed = self._blocks.num_blocks_needed(request, request.num_next_tokens(row_budget))
        if needed + self._num_reserved_blocks() > self._blocks.num_free - reserved:
            self._blocks.release_prefix(request)
            self._entries[request].refusal = len(self.running), num_free
            return None
        self._unqueue(request)
        insort(self.running, request, key=self._arrival)
        return needed

    def _still_lacks_blocks(self, request: EngineRequest) -> bool:
        """Return whether no block was freed since the request did not fit. Then its prefix is not looked up again."""
        refusal = self._entries[request].refusal
        return refusal is not None and len(self.running) >= refusal[0] and self._blocks.num_free <= refusal[1]

    def _count_overtaking(self, request: EngineRequest, lacking: Sequence[EngineRequest]) -> None:
        """Count that a request started while older ones lack blocks."""
        for other in lacking:
            if self._arrival(other) < self._arrival(request):
                self._entries[other].num_overtaken += 1

    def _startable_candidates(self, candidates: list[EngineRequest], lacking: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Return the candidates that may start. Requests younger than one that was overtaken too often must wait."""
        limit = next((one for one in lacking if self._entries[one].num_overtaken >= MAX_OVERTAKEN), None)
        if limit is None:
            return candidates
        return [one for one in candidates if self._arrival(one) < self._arrival(limit)]

    def _num_reserved_blocks(self) -> int:
        """Return the blocks to leave free when a request starts: some per running request; none if it would run alone."""
        return self.limits.spare_blocks * (len(self.running) + 1) if self.running else 0

    def _share_prefill_rows(self, prompts: Sequence[EngineRequest], row_budget: int) -> list[int]:
        """Return the rows of each prompt, running or waiting, in the next pass."""
        num_uncached = [self._num_uncached(request) for request in prompts]
        max_rows = [min(request.num_next_tokens(row_budget), left) for request, left in zip(prompts, num_uncached, strict=True)]
        return share_rows(num_uncached, max_rows, row_budget)

    def _num_uncached(self, request: EngineRequest) -> int:
        """Return the tokens left to compute. For a waiting request the cached prefix is that found when it was queued."""
        return min(request.num_uncached, self._entries[request].num_uncached)

    def _queue(self, request: EngineRequest) -> None:
        entry = self._entries[request]
        entry.is_counted = self._is_ready(request)
        entry.num_uncached = request.num_uncached - (self._blocks.cached_prefix_len(request) if entry.is_counted else 0)
        entry.refusal = None
        insort(self.waiting, request, key=self._arrival)
        insort(self._shortest, request, key=self._length)

    def _unqueue(self, request: EngineRequest) -> None:
        del self.waiting[bisect_left(self.waiting, self._arrival(request), key=self._arrival)]
        del self._shortest[bisect_left(self._shortest, self._length(request), key=self._length)]
        entry = self._entries[request]
        entry.num_uncached, entry.refusal = request.num_uncached, None

    def _arrival(self, request: EngineRequest) -> int:
        return self._entries[request].arrival

    def _length(self, request: EngineRequest) -> tuple[int, int]:
        entry = self._entries[request]
        return entry.num_uncached, entry.arrival
