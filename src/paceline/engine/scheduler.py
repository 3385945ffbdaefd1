"""Which requests run in the next pass. Numbers of rows and blocks only: no tensor, no model.

    waiting   in order of arrival; preempted requests keep their place in it
    running   in order of arrival; these hold blocks of the cache

**Rows.** Each decoding request has one row in every pass. Prompts share `prefill_chunk_size` further rows: half of these go to the oldest
prompts, the other half to the prompts with the fewest tokens left. So a short prompt runs at once next to any number of long ones, and
the oldest prompt gets half of the rows whatever arrives (two queues, FIFO and shortest remaining processing time).

**Blocks.** A waiting request begins when the rows of its first pass fit the cache. Where the next rows of a running one do not fit, the
youngest is preempted: its rows are dropped, its tokens stay and run again later. Only younger requests are preempted for older ones, so
the oldest always goes on. A request that lacks blocks is overtaken at most `MAX_OVERTAKEN` times, so every request comes to an end.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

MAX_OVERTAKEN = 16
"""Younger requests that may begin while an older one lacks blocks; then free blocks are kept for the older one."""


class Schedulable(Protocol):
    """A request as the scheduler sees it."""

    @property
    def num_uncached(self) -> int:
        """Known tokens without rows in the cache; 1 while it decodes."""
        ...

    def num_next_tokens(self, max_rows: int, /) -> int:
        """Return the number of tokens that the next pass computes for the request, at most `max_rows`; 1 while it decodes."""
        ...


Request = TypeVar("Request", bound=Schedulable)
RequestIn = TypeVar("RequestIn", bound=Schedulable, contravariant=True)


class BlockManager(Protocol[RequestIn]):
    """The cache as the scheduler sees it; its tests count blocks only."""

    @property
    def num_free(self) -> int:
        """Blocks that are free or can be evicted."""
        ...

    def num_needed(self, request: RequestIn, num_rows: int, /) -> int:
        """Blocks that its next `num_rows` rows take, beyond those it has."""
        ...

    def cached_prefix_len(self, request: RequestIn, /) -> int:
        """Rows that `match_prefix` would find now; nothing is changed."""
        ...

    def match_prefix(self, request: RequestIn, /) -> None:
        """Let a request without rows adopt those that the cache holds already."""
        ...

    def release_prefix(self, request: RequestIn, /) -> None:
        """Undo `match_prefix`: there are no blocks for the rest of its pass."""
        ...

    def free(self, request: RequestIn, /) -> None:
        """Free the blocks of a preempted request; it begins again later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a pass may hold.

    Attributes:
        max_num_seqs: requests that run at a time, at most `max_num_batched_tokens`.
        max_num_batched_tokens: rows of a pass, known tokens and drafts.
        prefill_chunk_size: prompt rows of a pass, of all requests together.
        spare_blocks: blocks that must be left for each running request when another one begins, so that it is not preempted at once.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefill_chunk_size: int = 256
    spare_blocks: int = 1

    @property
    def num_seats(self) -> int:
        """Requests that run at a time: no more than a pass has rows."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_unfinished_prompts(self) -> int:
        """Running requests whose prompts need further passes. The other half of the seats is left to short prompts."""
        return max(1, self.num_seats // 2)


class Scheduled(NamedTuple, Generic[Request]):
    """A request of the next pass, and how many of its known tokens run in it."""

    request: Request
    num_rows: int


@dataclass(slots=True)
class _Record:
    """What the scheduler keeps of a request.

    Attributes:
        arrival: its number in the order of arrival.
        num_uncached: tokens that had to run when it was queued.
        is_counted: whether `num_uncached` is without its prefix in the cache; not before it may begin.
        refusal: running requests and free blocks when it did not fit the cache; None = it was not refused since.
        num_overtaken: younger requests that began while it lacked blocks.
    """

    arrival: int
    num_uncached: int = 0
    is_counted: bool = False
    refusal: tuple[int, int] | None = None
    num_overtaken: int = 0


def share_rows(num_uncached: Sequence[int], max_rows: Sequence[int], row_budget: int) -> list[int]:
    """Share the prompt rows of a pass: half to the oldest prompts, what is left to those with the fewest tokens left.

    Args:
        num_uncached: tokens left of each prompt, the oldest prompt first.
        max_rows: rows that each can take in this pass.

    Returns:
        rows of each; in total `row_budget`, or all of `max_rows` if these are fewer.
    """
    shares = [0] * len(max_rows)
    rows_left = _hand_out(range(len(shares)), shares, max_rows, row_budget - row_budget // 2)
    by_length = sorted(range(len(shares)), key=lambda index: num_uncached[index] - shares[index])
    _hand_out(by_length, shares, max_rows, rows_left + row_budget // 2)
    return shares


def _hand_out(order: Iterable[int], shares: list[int], max_rows: Sequence[int], rows_left: int) -> int:
    """Raise shares to their maximum, in order, while rows are left; returns how many are left."""
    for index in order:
        more = min(max_rows[index] - shares[index], rows_left)
        shares[index] += more
        rows_left -= more
    return rows_left


class Scheduler(Generic[Request]):
    """Chooses the requests of each pass.

    Args:
        blocks: of the cache.
        is_ready: whether a waiting request may begin; others overtake it while it may not.

    Attributes:
        num_preemptions: how often a request's rows were dropped.
    """

    def __init__(self, blocks: BlockManager[Request], limits: Limits, is_ready: Callable[[Request], bool] = lambda _: True) -> None:
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._blocks, self._is_ready = blocks, is_ready
        self._shortest: list[Request] = []  # those that wait, by the tokens that have to run
        self._records: dict[Request, _Record] = {}
        self._num_arrived = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._records[request] = _Record(self._num_arrived)
        self._num_arrived += 1
        self._queue(request)

    def remove(self, request: Request) -> bool:
        """Take a request out, waiting or running; its blocks are left to the caller. False where it is not here."""
        if request not in self._records:
            return False
        if request in self.running:
            self.running.remove(request)
        else:
            self._unqueue(request)
        del self._records[request]
        return True

    def preempt(self, request: Request) -> None:
        """Drop a running request's rows; it waits again, in its place by arrival."""
        self.running.remove(request)
        self._blocks.free(request)
        self._queue(request)
        self.num_preemptions += 1

    def next_pass(self) -> list[Scheduled[Request]]:
        """Choose the requests of the next pass, oldest first; empty only if nothing fits even where one request is alone."""
        decoding = {request for request in self.running if request.num_uncached == 1}
        row_budget = max(0, min(self.limits.prefill_chunk_size, self.limits.max_num_batched_tokens - len(decoding)))
        if self.waiting and row_budget > 0 and len(self.running) < self.limits.num_seats:
            self._begin_requests(decoding, row_budget)
        prompts = [request for request in self.running if request not in decoding]
        num_rows = dict.fromkeys(decoding, 1) | dict(zip(prompts, self._share(prompts, row_budget), strict=True))
        return self._claim_blocks(num_rows)

    def _claim_blocks(self, num_rows: dict[Request, int]) -> list[Scheduled[Request]]:
        """Choose the running requests whose rows fit the cache, oldest first; younger ones are preempted where that makes room."""
        picked: list[Scheduled[Request]] = []
        promised = index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            due = request.num_next_tokens(num_rows[request])
            if due == 0:
                continue
            needed = self._blocks.num_needed(request, due)
            if needed > 0 and not self._preempt_until_free(needed + promised, index):
                continue  # it keeps what it has; an older one may take that
            picked.append(Scheduled(request, due))
            promised += needed
        return picked

    def _preempt_until_free(self, wanted: int, first: int) -> bool:
        """Preempt running requests from index `first` on, the youngest first, until `wanted` blocks are free; whether they are."""
        while self._blocks.num_free < wanted:
            if first == len(self.running):
                return False
            self.preempt(self.running[-1])
        return True

    def _begin_requests(self, decoding: set[Request], row_budget: int) -> None:
        """Begin waiting requests that would get rows of the pass, oldest first, while there are seats and blocks for them."""
        promised = sum(self._blocks.num_needed(request, request.num_next_tokens(row_budget)) for request in self.running)
        if promised > self._blocks.num_free:
            return  # a running request may lack blocks
        candidates, lacking = self._candidates()
        while candidates and len(self.running) < self.limits.num_seats:
            running = [request for request in self.running if request not in decoding]
            prompts = sorted([*running, *candidates], key=self._arrival)
            shares = dict(zip(prompts, self._share(prompts, row_budget), strict=True))
            request = next((one for one in candidates if shares[one] > 0), None)
            if request is None:
                return
            candidates.remove(request)
            num_unfinished = sum(shares[one] < one.num_uncached for one in running)
            if shares[request] < self._num_uncached(request) and num_unfinished >= self.limits.max_unfinished_prompts:
                continue
            needed = self._begin(request, row_budget, promised)
            if needed is None:
                insort(lacking, request, key=self._arrival)
            else:
                promised += needed
                self._count_overtaking(request, lacking)
            candidates = self._without_barred(candidates, lacking)

    def _candidates(self) -> tuple[list[Request], list[Request]]:
        """Waiting requests that may begin, and older ones that still lack blocks; both oldest first.

        Of a long queue only the oldest and the shortest are looked at, as many of each as can run at a time.
        """
        lacking: list[Request] = []
        oldest: list[Request] = []
        for request in list(self.waiting):
            if len(oldest) == self.limits.num_seats:
                break
            if self._lacks_blocks_still(request):
                lacking.append(request)
                if self._records[request].num_overtaken >= MAX_OVERTAKEN:
                    break
            elif self._is_ready(request):
                oldest.append(request)
                if not self._records[request].is_counted:  # further samples of a prompt whose rows are there now
                    self._unqueue(request)
                    self._queue(request)
        may_begin = (one for one in self._shortest if not self._lacks_blocks_still(one) and self._is_ready(one))
        chosen = {*oldest, *islice(may_begin, self.limits.num_seats)}
        return self._without_barred(sorted(chosen, key=self._arrival), lacking), lacking

    def _begin(self, request: Request, row_budget: int, promised: int) -> int | None:
        """Begin a waiting request; returns the blocks of its first pass, None if they are not to be had."""
        num_free = self._blocks.num_free
        self._blocks.match_prefix(request)
        needed = self._blocks.num_needed(request, request.num_next_tokens(row_budget))
        if needed + self._num_spare() > self._blocks.num_free - promised:
            self._blocks.release_prefix(request)
            self._records[request].refusal = len(self.running), num_free
            return None
        self._unqueue(request)
        insort(self.running, request, key=self._arrival)
        return needed

    def _lacks_blocks_still(self, request: Request) -> bool:
        """Whether no block was freed since the request did not fit, so that to look up its prefix again would be useless."""
        refusal = self._records[request].refusal
        return refusal is not None and len(self.running) >= refusal[0] and self._blocks.num_free <= refusal[1]

    def _count_overtaking(self, request: Request, lacking: Sequence[Request]) -> None:
        """Count that a request began while older ones lack blocks."""
        for other in lacking:
            if self._arrival(other) < self._arrival(request):
                self._records[other].num_overtaken += 1

    def _without_barred(self, candidates: list[Request], lacking: Sequence[Request]) -> list[Request]:
        """Leave out candidates that are younger than a request without blocks that was overtaken often enough."""
        barring = next((one for one in lacking if self._records[one].num_overtaken >= MAX_OVERTAKEN), None)
        if barring is None:
            return candidates
        return [one for one in candidates if self._arrival(one) < self._arrival(barring)]

    def _num_spare(self) -> int:
        """Blocks to leave for the running requests and one more; none where it would run alone."""
        return self.limits.spare_blocks * (len(self.running) + 1) if self.running else 0

    def _share(self, prompts: Sequence[Request], row_budget: int) -> list[int]:
        """Rows of each prompt, running or waiting, in the next pass."""
        num_uncached = [self._num_uncached(request) for request in prompts]
        max_rows = [min(request.num_next_tokens(row_budget), left) for request, left in zip(prompts, num_uncached, strict=True)]
        return share_rows(num_uncached, max_rows, row_budget)

    def _num_uncached(self, request: Request) -> int:
        """Tokens that have to run: of a waiting request what its prefix in the cache left when it was queued."""
        return min(request.num_uncached, self._records[request].num_uncached)

    def _queue(self, request: Request) -> None:
        record = self._records[request]
        record.is_counted = self._is_ready(request)
        record.num_uncached = request.num_uncached - (self._blocks.cached_prefix_len(request) if record.is_counted else 0)
        record.refusal = None
        insort(self.waiting, request, key=self._arrival)
        insort(self._shortest, request, key=self._length)

    def _unqueue(self, request: Request) -> None:
        del self.waiting[bisect_left(self.waiting, self._arrival(request), key=self._arrival)]
        del self._shortest[bisect_left(self._shortest, self._length(request), key=self._length)]
        record = self._records[request]
        record.num_uncached, record.refusal = request.num_uncached, None

    def _arrival(self, request: Request) -> int:
        return self._records[request].arrival

    def _length(self, request: Request) -> tuple[int, int]:
        record = self._records[request]
        return record.num_uncached, record.arrival
