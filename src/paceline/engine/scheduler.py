"""Chooses the requests of the next forward pass, and how many rows of each prompt it computes.

    waiting   requests that have not started or were preempted, in order of arrival
    running   requests that own blocks of the cache, in order of arrival

**Rows.** Each decoding request has one row in every pass. Prompts share `prefill_chunk_size` further rows: half of them go to the oldest
prompts (FIFO), the other half to the prompts with the fewest tokens left (shortest remaining processing time).

**Blocks.** A waiting request starts when the rows of its first pass fit in the cache. If the next rows of a running request do not fit, the
youngest running request is preempted: its rows are dropped and computed again later. A request is preempted only for older ones. While a
waiting request lacks blocks, at most `MAX_OVERTAKES` younger ones start. So every request finishes.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from paceline.engine.request import EngineRequest
from paceline.kv_cache.cache import KVCache

MAX_OVERTAKES = 16
"""How many younger requests may start before a request that waits for blocks. After that, the waiting request starts first."""


class BlockManager:
    """Allocates and frees the cache blocks of requests.

    Args:
        on_preempt: called with each preempted request that has been in a pass.
    """

    def __init__(self, cache: KVCache, on_preempt: Callable[[EngineRequest], None]) -> None:
        self._cache, self._on_preempt = cache, on_preempt

    @property
    def num_free(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return self._cache.pool.num_free

    def num_blocks_needed(self, request: EngineRequest, num_rows: int) -> int:
        """Return the number of blocks to allocate for the next `num_rows` rows."""
        return self._cache.num_blocks_needed(request.cached_sequence, range(-1, num_rows - 1))

    def cached_prefix_len(self, request: EngineRequest) -> int:
        """Return the number of rows that `match_prefix` would find in the cache now."""
        return 0 if request.needs_prompt_logits else self._cache.cached_prefix_len(request.cached_sequence, request.token_ids)

    def match_prefix(self, request: EngineRequest) -> None:
        """Assign the longest cached prefix of a request's tokens to the request, which has no rows yet."""
        if request.needs_prompt_logits:
            return
        num_cached = self._cache.match_prefix(request.cached_sequence, request.token_ids)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached

    def release_prefix(self, request: EngineRequest) -> None:
        """Undo `match_prefix`, because too few blocks are free for the other rows of the first pass."""
        self._cache.release_prefix(request.cached_sequence)

    def free_blocks(self, request: EngineRequest) -> None:
        """Free all blocks of a preempted request."""
        if request.started_s:
            self._on_preempt(request)
            request.num_preemptions += 1
        self._cache.release_sequence(request.cached_sequence)
        request.cached_sequence = self._cache.new_sequence(request.prefix_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of running requests and of a pass.

    Attributes:
        max_num_seqs: maximum number of running requests.
        max_num_batched_tokens: maximum rows of a pass, drafts included.
        prefill_chunk_size: maximum prompt rows of a pass, of all requests together.
        spare_blocks: blocks per running request that must stay free when a request starts; with fewer, it would soon be preempted.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefill_chunk_size: int = 256
    spare_blocks: int = 1

    @property
    def max_running(self) -> int:
        """Maximum number of running requests. Each needs a row in every pass."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_unfinished_prompts(self) -> int:
        """Maximum number of running requests with unfinished prompts, so that long prompts do not keep short ones from starting."""
        return max(1, self.max_running // 2)


@dataclass(slots=True)
class _RequestInfo:
    """The scheduler's state of one request.

    Attributes:
        arrival: number of the request in order of arrival.
        num_uncached: tokens that had to be computed when the request was queued.
        is_prefix_subtracted: whether `num_uncached` excludes the cached prefix, which is looked up when the request is ready.
        last_failed_start: (running requests, free blocks) when too few blocks were free to start the request; None = not tried yet.
        num_overtakes: how many younger requests started while this one waited for blocks.
    """

    arrival: int
    num_uncached: int = 0
    is_prefix_subtracted: bool = False
    last_failed_start: tuple[int, int] | None = None
    num_overtakes: int = 0


def share_prompt_rows(num_uncached: Sequence[int], max_rows: Sequence[int], row_budget: int) -> list[int]:
    """Divide the prompt rows of a pass: half go to the oldest prompts, the rest to the prompts with the fewest tokens left.

    Args:
        num_uncached: number of tokens left of each prompt, the oldest prompt first.
        max_rows: maximum number of rows that each prompt can use.
        row_budget: number of rows to divide.

    Returns:
        the number of rows of each prompt; in total `row_budget`, or the sum of `max_rows` if that is less.
    """
    shares = [0] * len(max_rows)
    rows_left = _fill_shares(range(len(shares)), shares, max_rows, row_budget - row_budget // 2)
    by_length = sorted(range(len(shares)), key=lambda index: num_uncached[index] - shares[index])
    _fill_shares(by_length, shares, max_rows, rows_left + row_budget // 2)
    return shares


def _fill_shares(order: Iterable[int], shares: list[int], max_rows: Sequence[int], rows_left: int) -> int:
    """Give each prompt, in `order`, as many rows as it can use, until no rows are left; return the number of rows left."""
    for index in order:
        num_rows = min(max_rows[index] - shares[index], rows_left)
        shares[index] += num_rows
        rows_left -= num_rows
    return rows_left


class Scheduler:
    """Chooses the requests of each pass.

    Args:
        is_ready: returns whether a waiting request may start. If it returns False, younger requests start first.

    Attributes:
        num_preemptions: how often a request was preempted.
    """

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits, is_ready: Callable[[EngineRequest], bool] = lambda _: True) -> None:
        self.limits = limits
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.num_preemptions = 0
        self._blocks, self._is_ready = blocks, is_ready
        self._shortest: list[EngineRequest] = []  # waiting requests, fewest tokens to compute first
        self._infos: dict[EngineRequest, _RequestInfo] = {}
        self._num_arrived = 0

    def add(self, request: EngineRequest) -> None:
        self._infos[request] = _RequestInfo(self._num_arrived)
        self._num_arrived += 1
        self._enqueue(request)

    def remove(self, request: EngineRequest) -> bool:
        """Remove a waiting or running request, whose blocks the caller frees. Return False if it was removed before."""
        if request not in self._infos:
            return False
        if request in self.running:
            self.running.remove(request)
        else:
            self._dequeue(request)
        del self._infos[request]
        return True

    def preempt(self, request: EngineRequest) -> None:
        """Drop the rows of a running request, and queue it again at its position by order of arrival."""
        self.running.remove(request)
        self._blocks.free_blocks(request)
        self._enqueue(request)
        self.num_preemptions += 1

    def next_pass(self) -> dict[EngineRequest, int]:
        """Return the requests of the next pass, oldest first, with the number of tokens that the pass computes of each, without drafts.

        The pass is empty if there are no requests, or if none fits in the cache.
        """
        decoding = {request for request in self.running if request.num_uncached == 1}
        row_budget = max(0, min(self.limits.prefill_chunk_size, self.limits.max_num_batched_tokens - len(decoding)))
        if self.waiting and row_budget > 0 and len(self.running) < self.limits.max_running:
            self._start_requests(decoding, row_budget)
        prompts = [request for request in self.running if request not in decoding]
        num_rows = dict.fromkeys(decoding, 1) | dict(zip(prompts, self._share_prefill_rows(prompts, row_budget), strict=True))
        return self._claim_blocks(num_rows)

    def _claim_blocks(self, num_rows: dict[EngineRequest, int]) -> dict[EngineRequest, int]:
        """Return the running requests whose next `num_rows` fit in free blocks, oldest first. Younger ones are preempted for older ones."""
        scheduled: dict[EngineRequest, int] = {}
        num_reserved = index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            num_tokens = request.num_next_tokens(num_rows[request])
            if num_tokens == 0:
                continue
            num_needed = self._blocks.num_blocks_needed(request, num_tokens)
            if num_needed > 0 and not self._preempt_until_free(num_needed + num_reserved, index):
                continue  # this request is not in the pass, but keeps its cached rows
            scheduled[request] = num_tokens
            num_reserved += num_needed
        return scheduled

    def _preempt_until_free(self, num_blocks: int, first_index: int) -> bool:
        """Preempt `running[first_index:]`, youngest first, until `num_blocks` blocks are free. Return False if that is not enough."""
        while self._blocks.num_free < num_blocks:
            if first_index == len(self.running):
                return False
            self.preempt(self.running[-1])
        return True

    def _start_requests(self, decoding: set[EngineRequest], row_budget: int) -> None:
        """Start waiting requests, oldest first, if they get rows of the pass and fit in the cache, up to `max_running` requests."""
        num_reserved = sum(self._blocks.num_blocks_needed(request, request.num_next_tokens(row_budget)) for request in self.running)
        if num_reserved > self._blocks.num_free:
            return  # running requests need more blocks than are free
        candidates, blocked = self._find_candidates()
        while candidates and len(self.running) < self.limits.max_running:
            running = [request for request in self.running if request not in decoding]
            prompts = sorted([*running, *candidates], key=self._arrival_key)
            shares = dict(zip(prompts, self._share_prefill_rows(prompts, row_budget), strict=True))
            request = next((one for one in candidates if shares[one] > 0), None)
            if request is None:
                return
            candidates.remove(request)
            num_unfinished = sum(shares[one] < one.num_uncached for one in running)
            if shares[request] < self._num_uncached(request) and num_unfinished >= self.limits.max_unfinished_prompts:
                continue
            num_needed = self._start_request(request, row_budget, num_reserved)
            if num_needed is None:
                insort(blocked, request, key=self._arrival_key)
            else:
                num_reserved += num_needed
                for other in blocked:
                    if self._arrival_key(other) < self._arrival_key(request):
                        self._infos[other].num_overtakes += 1
            candidates = self._startable_candidates(candidates, blocked)

    def _find_candidates(self) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """Return the waiting requests that may start, and those that still lack blocks, both oldest first.

        In a long queue, only the oldest and the shortest requests are considered, `max_running` of each.
        """
        blocked: list[EngineRequest] = []
        oldest: list[EngineRequest] = []
        for request in list(self.waiting):
            if len(oldest) == self.limits.max_running:
                break
            if self._still_lacks_blocks(request):
                blocked.append(request)
                if self._infos[request].num_overtakes >= MAX_OVERTAKES:
                    break
            elif self._is_ready(request):
                oldest.append(request)
                if not self._infos[request].is_prefix_subtracted:  # ready now: another sample of its prompt has cached the rows
                    self._dequeue(request)
                    self._enqueue(request)
        may_start = (one for one in self._shortest if not self._still_lacks_blocks(one) and self._is_ready(one))
        candidates = {*oldest, *islice(may_start, self.limits.max_running)}
        return self._startable_candidates(sorted(candidates, key=self._arrival_key), blocked), blocked

    def _start_request(self, request: EngineRequest, row_budget: int, num_reserved: int) -> int | None:
        """Start a waiting request; return how many blocks its first pass needs, or None if fewer are free besides `num_reserved`."""
        num_free = self._blocks.num_free
        self._blocks.match_prefix(request)
        num_needed = self._blocks.num_blocks_needed(request, request.num_next_tokens(row_budget))
        num_spare = self.limits.spare_blocks * (len(self.running) + 1) if self.running else 0  # these blocks must stay free
        if num_needed + num_spare > self._blocks.num_free - num_reserved:
            self._blocks.release_prefix(request)
            self._infos[request].last_failed_start = len(self.running), num_free
            return None
        self._dequeue(request)
        insort(self.running, request, key=self._arrival_key)
        return num_needed

    def _still_lacks_blocks(self, request: EngineRequest) -> bool:
        """Return whether no block was freed since the last failed start. This is cheaper than looking up the request's prefix again."""
        failed_start = self._infos[request].last_failed_start
        return failed_start is not None and len(self.running) >= failed_start[0] and self._blocks.num_free <= failed_start[1]

    def _startable_candidates(self, candidates: list[EngineRequest], blocked: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Return the candidates that may start: those older than all requests that were overtaken `MAX_OVERTAKES` times."""
        oldest_blocked = next((one for one in blocked if self._infos[one].num_overtakes >= MAX_OVERTAKES), None)
        if oldest_blocked is None:
            return candidates
        return [one for one in candidates if self._arrival_key(one) < self._arrival_key(oldest_blocked)]

    def _share_prefill_rows(self, prompts: Sequence[EngineRequest], row_budget: int) -> list[int]:
        """Return how many rows of the next pass each prompt gets. `prompts` are running or waiting, oldest first."""
        num_uncached = [self._num_uncached(request) for request in prompts]
        max_rows = [min(request.num_next_tokens(row_budget), num_left) for request, num_left in zip(prompts, num_uncached, strict=True)]
        return share_prompt_rows(num_uncached, max_rows, row_budget)

    def _num_uncached(self, request: EngineRequest) -> int:
        """Return the number of tokens left to compute, without the prefix that was cached when a waiting request was queued."""
        return min(request.num_uncached, self._infos[request].num_uncached)

    def _enqueue(self, request: EngineRequest) -> None:
        info = self._infos[request]
        info.is_prefix_subtracted = self._is_ready(request)
        info.num_uncached = request.num_uncached - (self._blocks.cached_prefix_len(request) if info.is_prefix_subtracted else 0)
        info.last_failed_start = None
        insort(self.waiting, request, key=self._arrival_key)
        insort(self._shortest, request, key=self._fewest_uncached_first_key)

    def _dequeue(self, request: EngineRequest) -> None:
        del self.waiting[bisect_left(self.waiting, self._arrival_key(request), key=self._arrival_key)]
        del self._shortest[bisect_left(self._shortest, self._fewest_uncached_first_key(request), key=self._fewest_uncached_first_key)]
        info = self._infos[request]
        info.num_uncached, info.last_failed_start = request.num_uncached, None

    def _arrival_key(self, request: EngineRequest) -> int:
        return self._infos[request].arrival

    def _fewest_uncached_first_key(self, request: EngineRequest) -> tuple[int, int]:
        info = self._infos[request]
        return info.num_uncached, info.arrival
