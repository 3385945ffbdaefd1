"""Steps that all requests of a batch rest: nobody is planned for, and what the steps took is learned of all of them at once.

A step of a small model takes a millisecond or two, so what a plan takes counts. Requests for which guesses were of no use lately rest some
steps each; where all of a batch do, their steps are recognised by the requests alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.pass_work import PassWork
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason

LONGEST = 64  # steps: of what is measured meanwhile nothing is known before its end


def steps_until(rest: int, step: int) -> int:
    """Steps to rest from `step` on, at most `rest`, so that all that rest as long are thought of again in the same step.

    Guessing for several requests takes about what it takes for one.

    Args:
        rest: a power of 2, less 1.
        step: number of the next step.
    """
    return -step % (rest + 1)


def rest_after(num_vain: int, share: int, most: int) -> int:
    """Steps to rest after so many in vain: about one for each `share` of them, at most `most`; a power of 2, less 1."""
    return min(most, (1 << (num_vain // share + 1).bit_length() - 1) - 1)


@dataclass(slots=True)
class PlainSteps:
    """What plain steps of the same requests took, one after another.

    Attributes:
        work: of the first of them.
        passes_s: seconds of each one's pass.
        hosts_s: of its other work.
        rested_s: the same of those that were rested.
    """

    work: PassWork = field(default_factory=PassWork)
    passes_s: list[float] = field(default_factory=list)
    hosts_s: list[float] = field(default_factory=list)
    rested_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class BatchRest:
    """The rest of the requests that made up the last steps, none while `left` is 0, and what these took.

    Attributes:
        left: steps that are still to be rested.
        is_under_way: whether the step under way is one of them.
        steps: plain ones of the same requests of which nothing was learned yet.
    """

    left: int = 0
    is_under_way: bool = False
    steps: PlainSteps = field(default_factory=PlainSteps)
    requests: list[Request] = field(default_factory=list)
    _reasons: list[PlainReason] = field(default_factory=list)

    def is_of(self, batch: Sequence[RequestRows]) -> bool:
        """Whether these requests, and no others, made up the last steps, and decode."""
        return [rows.request for rows in batch] == self.requests and all(rows.num_known == 1 for rows in batch)

    def take(self, batch: Sequence[RequestRows]) -> None:
        """These made up the last step."""
        self.stop()
        work = PassWork.of(batch, with_guesses=False)
        self.requests, self.steps = [rows.request for rows in batch] if work.is_decoding else [], PlainSteps(work)

    def begin(self, batch: Sequence[RequestRows]) -> None:
        """Rest as long as every request of the last step may; not at all where one may not."""
        if not self.requests:
            return
        least, reasons = LONGEST, []
        for rows in batch:
            request = rows.request
            if request.speculation.is_off:
                reasons.append(PlainReason.OFF)
                continue
            own = request.acceptance
            if own is None or own.num_idle == 0 or not rows.is_decoding or request.is_finished or request.processor.constraint is not None:
                return
            reasons.append(PlainReason.NO_GUESS if own.is_unable else PlainReason.DID_NOT_PAY)
            least = min(least, own.num_idle)
        self._reasons, self.left = reasons, least
        self._lengthen(-least)

    def begins(self, batch: Sequence[RequestRows]) -> bool:
        """Whether a step is one of the rest, which ends where others take part; its requests are told why they are not thought of."""
        if not self.is_of(batch):
            self.stop()
            return False
        for rows, reason in zip(batch, self._reasons, strict=True):
            rows.plain_reason = reason
        self.left -= 1
        self.is_under_way = True
        return True

    def holds(self, request: Request) -> bool:
        """Whether a request is one of those that made up the last steps."""
        return request in self.requests

    def note(self, pass_s: float, host_s: float) -> None:
        """Told at its end what the step under way took."""
        if self.is_under_way:
            self.is_under_way = False
            self.steps.rested_s.append(host_s)
        self.steps.passes_s.append(pass_s)
        self.steps.hosts_s.append(host_s)

    def stop(self) -> None:
        """End it: its requests rest by themselves what is left of it."""
        self._lengthen(self.left)
        self.left = 0
        self.requests, self._reasons = [], []

    def _lengthen(self, num_steps: int) -> None:
        """Let each request rest so many steps more by itself."""
        for request in self.requests:
            if request.acceptance is not None:
                request.acceptance.num_idle += num_steps
