"""Who runs in the next pass. Numbers of rows and blocks only: no tensor, no model.

    waiting   in order of arrival; whoever was preempted stands at the front again
    running   oldest first: has rows in the cache, or may put some there

First come, first served. A request begins when the rows of its first pass fit the cache. Where the next rows of a running one do not fit,
the youngest is preempted: its rows are dropped, its tokens stay and run again later. Only younger ones make room for older ones, so the
oldest always goes on, and so everybody comes to an end.

A pass holds `max_step_rows` rows and never more: whoever decodes has one, prompts share what is left, the oldest first. So no more run at a
time than a pass has rows.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """A request as the scheduler sees it."""

    def num_due(self, max_rows: int, /) -> int:
        """Known tokens that run in its next pass, at most `max_rows`; 1 while it decodes."""
        ...


Request = TypeVar("Request", bound=Schedulable)
RequestIn = TypeVar("RequestIn", bound=Schedulable, contravariant=True)


class Room(Protocol[RequestIn]):
    """The cache as the scheduler sees it."""

    @property
    def num_free(self) -> int:
        """Blocks that can be had now."""
        ...

    def num_needed(self, request: RequestIn, num_rows: int, /) -> int:
        """Blocks that its next `num_rows` rows take, beyond those it has."""
        ...

    def begin(self, request: RequestIn, /) -> None:
        """Let a request without rows adopt those the cache holds already."""
        ...

    def refuse(self, request: RequestIn, /) -> None:
        """Take back what `begin` did: there was no room for what else it needs."""
        ...

    def drop(self, request: RequestIn, /) -> None:
        """Give its blocks back; it begins again later."""
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


@dataclass(frozen=True, slots=True)
class Scheduled(Generic[Request]):
    """A request of the next pass, and how many of its known tokens run in it."""

    request: Request
    num_rows: int


class Scheduler(Generic[Request]):
    """Chooses the requests of each pass.

    Args:
        is_ready: whether a waiting request may begin; others pass it while it may not.

    Attributes:
        num_preemptions: how often a request's rows were dropped.
    """

    def __init__(self, room: Room[Request], limits: Limits, is_ready: Callable[[Request], bool] = lambda _: True) -> None:
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._room, self._is_ready = room, is_ready
        self._refused: tuple[Request, int, int] | None = None  # who did not fit, beside how many running ones, with how many blocks free

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        self.waiting.append(request)

    def remove(self, request: Request) -> bool:
        """Take a request out, whatever it was doing; its blocks are the caller's business. False where it is not here."""
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
        rows_left, num_decoding = self.limits.max_step_rows, wanted.count(1)  # the latter: those to come
        promised = index = 0
        must_wait = False  # somebody has no room: nobody new begins
        while index < len(self.running):
            request, due = self.running[index], wanted[index]
            index += 1
            if due == 1:
                num_decoding -= 1
            elif rows_left - num_decoding < due:
                due = request.num_due(max(0, rows_left - num_decoding))
            if due == 0:
                continue
            needed = self._room.num_needed(request, due)
            if needed > 0 and not self._make_room(needed + promised, index):
                must_wait = True  # it keeps what it has; an older one may take that
                continue
            picked.append(Scheduled(request, due))
            rows_left, promised = rows_left - due, promised + needed
        if self.waiting and not must_wait and self.num_preemptions == num_preemptions:
            self._admit(picked, rows_left, promised)
        return picked

    def _make_room(self, wanted: int, first: int) -> bool:
        """Whether `wanted` blocks are free, once as many as need be of those from index `first` on are preempted, the youngest first."""
        while self._room.num_free < wanted:
            if first == len(self.running):
                return False
            self.preempt(self.running[-1])
        return True

    def preempt(self, request: Request) -> None:
        """Drop a running request's rows; it is the first to begin again."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._room.drop(request)
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
            if self._is_refused_still(request):
                return
            num_free = self._room.num_free
            self._room.begin(request)
            due = request.num_due(min(self.limits.chunk_rows, rows_left))
            needed = self._room.num_needed(request, due)
            if needed + self._num_spare() > self._room.num_free - promised:
                self._room.refuse(request)
                self._refused = request, len(self.running), num_free
                return
            del self.waiting[index]
            self._refused = None
            self.running.append(request)
            picked.append(Scheduled(request, due))
            rows_left, promised = rows_left - due, promised + needed

    def _is_refused_still(self, request: Request) -> bool:
        """Whether nothing has come free since the request did not fit: looking for its prefix again would be in vain."""
        if self._refused is None or self._refused[0] is not request:
            return False
        _, num_running, num_free = self._refused
        return len(self.running) >= num_running and self._room.num_free <= num_free

    def _num_spare(self) -> int:
        """Blocks to leave for those that run and one more; none where it would run alone."""
        return self.limits.spare_blocks * (len(self.running) + 1) if self.running else 0
