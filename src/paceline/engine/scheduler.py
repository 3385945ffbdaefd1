"""Who runs in the next pass. Numbers of rows and blocks only: no tensor, no model.

    waiting   in order of arrival; preempted requests at the front
    running   oldest first; these hold blocks of the cache

First come, first served. A request begins when the rows of its first pass fit the cache. Where the next rows of a running one do not fit,
the youngest is preempted: its rows are dropped, its tokens stay and run again later. Only younger requests are preempted for older ones,
so the oldest always goes on, and every request comes to an end.

A pass holds at most `max_step_rows` rows: each decoding request has one, prompts share the rest, the oldest first. So no more requests run
at a time than a pass has rows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class Schedulable(Protocol):
    """A request as the scheduler sees it."""

    def num_due(self, max_rows: int, /) -> int:
        """Known tokens that run in its next pass, at most `max_rows`; 1 while it decodes."""
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

    def adopt_prefix(self, request: RequestIn, /) -> None:
        """Let a request without rows adopt those that the cache holds already."""
        ...

    def return_prefix(self, request: RequestIn, /) -> None:
        """Undo `adopt_prefix`: there are no blocks for the rest of its pass."""
        ...

    def free(self, request: RequestIn, /) -> None:
        """Give back the blocks of a preempted request; it begins again later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a pass may hold.

    Attributes:
        max_num_seqs: requests that run at a time, at most `max_step_rows`.
        max_step_rows: rows of a pass, known tokens and drafts.
        chunk_rows: prompt rows of one request in one pass.
        spare_blocks: blocks that must be left for each running request when another one begins, so that it is not preempted at once.
    """

    max_num_seqs: int = 16
    max_step_rows: int = 512
    chunk_rows: int = 256
    spare_blocks: int = 1


class Scheduled(NamedTuple, Generic[Request]):
    """A request of the next pass, and how many of its known tokens run in it."""

    request: Request
    num_rows: int


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
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._blocks, self._is_ready = blocks, is_ready
        self._refused: tuple[Request, int, int] | None = None  # one that did not fit, how many ran, blocks free then

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self.waiting.append(request)

    def remove(self, request: Request) -> bool:
        """Take a request out, waiting or running; its blocks are left to the caller. False where it is not here."""
        for group in (self.running, self.waiting):
            if request in group:
                group.remove(request)
                return True
        return False

    def next_pass(self) -> list[Scheduled[Request]]:
        """The requests of the next pass, oldest first; empty only if nothing fits even where one request is alone."""
        picked: list[Scheduled[Request]] = []
        num_preemptions = self.num_preemptions
        wanted = [request.num_due(self.limits.chunk_rows) for request in self.running]
        rows_left, num_decoding = self.limits.max_step_rows, wanted.count(1)  # the latter of those not yet looked at
        promised = index = 0
        must_wait = False  # a running request lacks blocks, so none begins
        while index < len(self.running):
            request, due = self.running[index], wanted[index]
            index += 1
            if due == 1:
                num_decoding -= 1
            elif rows_left - num_decoding < due:
                due = request.num_due(max(0, rows_left - num_decoding))
            if due == 0:
                continue
            needed = self._blocks.num_needed(request, due)
            if needed > 0 and not self._preempt_until_free(needed + promised, index):
                must_wait = True  # it keeps what it has; an older one may take that
                continue
            picked.append(Scheduled(request, due))
            rows_left, promised = rows_left - due, promised + needed
        if self.waiting and not must_wait and self.num_preemptions == num_preemptions:
            self._admit(picked, rows_left, promised)
        return picked

    def _preempt_until_free(self, wanted: int, first: int) -> bool:
        """Preempt running requests from index `first` on, the youngest first, until `wanted` blocks are free; whether they are."""
        while self._blocks.num_free < wanted:
            if first == len(self.running):
                return False
            self.preempt(self.running[-1])
        return True

    def preempt(self, request: Request) -> None:
        """Drop a running request's rows; it is the first to begin again."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._blocks.free(request)
        self.num_preemptions += 1

    def _admit(self, picked: list[Scheduled[Request]], rows_left: int, promised: int) -> None:
        """Begin requests, in order, while the pass has rows for them, and add them to `picked`."""
        index = 0
        max_num_seqs = min(self.limits.max_num_seqs, self.limits.max_step_rows)
        while index < len(self.waiting) and len(self.running) < max_num_seqs and rows_left > 0:
            request = self.waiting[index]
            if not self._is_ready(request):
                index += 1
                continue
            if self._lacks_blocks_still(request):
                return
            num_free = self._blocks.num_free
            self._blocks.adopt_prefix(request)
            due = request.num_due(min(self.limits.chunk_rows, rows_left))
            needed = self._blocks.num_needed(request, due)
            if needed + self._num_spare() > self._blocks.num_free - promised:
                self._blocks.return_prefix(request)
                self._refused = request, len(self.running), num_free
                return
            del self.waiting[index]
            self._refused = None
            self.running.append(request)
            picked.append(Scheduled(request, due))
            rows_left, promised = rows_left - due, promised + needed

    def _lacks_blocks_still(self, request: Request) -> bool:
        """Whether nothing was freed since the request did not fit, so that to look up its prefix again would be useless."""
        if self._refused is None or self._refused[0] is not request:
            return False
        _, num_running, num_free = self._refused
        return len(self.running) >= num_running and self._blocks.num_free <= num_free

    def _num_spare(self) -> int:
        """Blocks to leave for the running requests and one more; none where it would run alone."""
        return self.limits.spare_blocks * (len(self.running) + 1) if self.running else 0
