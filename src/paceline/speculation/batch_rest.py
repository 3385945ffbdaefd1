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

LONGEST = 32  # steps: what was measured meanwhile is not known before its end


def steps_until(rest: int, step: int) -> int:
    """Steps to rest from `step` on, at most `rest`, so that all that rest as long are thought of again in the same step.

    Guessing for several requests takes about what it takes for one.

    Args:
        rest: a power of 2, less 1.
        step: number of the next step.
    """
    return -step % (rest + 1)


@dataclass(slots=True)
class RestedSteps:
    """What the steps of a rest took.

    Attributes:
        work: of the first of them.
        passes_s: seconds of each one's pass.
        other_s: of its other work.
    """

    work: PassWork = field(default_factory=PassWork)
    passes_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class BatchRest:
    """The rest of the requests that made up the last step; none while `left` is 0.

    Attributes:
        left: steps that are still to be rested.
        is_under_way: whether the step under way is one of them.
        steps: those that were.
    """

    left: int = 0
    is_under_way: bool = False
    steps: RestedSteps = field(default_factory=RestedSteps)
    _requests: list[Request] = field(default_factory=list)
    _reasons: list[PlainReason] = field(default_factory=list)

    def begin(self, batch: Sequence[RequestRows]) -> None:
        """Rest as long as every request of a step that is over may; not at all where one may not."""
        least, reasons = LONGEST, []
        for rows in batch:
            request = rows.request
            if request.speculation.is_off:
                reasons.append(PlainReason.OFF)
                continue
            own = request.acceptance
            if own is None or own.num_idle == 0 or not rows.is_decoding or request.is_finished or request.processor.constraint is not None:
                return
            reasons.append(PlainReason.NO_GUESS if own.num_unable else PlainReason.DID_NOT_PAY)
            least = min(least, own.num_idle)
        self._requests, self._reasons, self.left = [rows.request for rows in batch], reasons, least
        self.steps = RestedSteps(PassWork.of(batch, with_guesses=False))
        self._lengthen(-least)

    def takes(self, batch: Sequence[RequestRows]) -> bool:
        """Whether a step is one of the rest, which ends where others take part; its requests are told why they are not thought of."""
        if [rows.request for rows in batch if rows.num_known == 1] != self._requests:
            self.stop()
            return False
        for rows, reason in zip(batch, self._reasons, strict=True):
            rows.plain_reason = reason
        self.left -= 1
        self.is_under_way = True
        return True

    def holds(self, request: Request) -> bool:
        """Whether a request is one of those that rest."""
        return request in self._requests

    def note(self, pass_s: float, other_s: float) -> None:
        """Told at its end what the step under way took."""
        self.is_under_way = False
        self.steps.passes_s.append(pass_s)
        self.steps.other_s.append(other_s)

    def stop(self) -> None:
        """End it: its requests rest by themselves what is left of it."""
        self._lengthen(self.left)
        self.left = 0
        self._requests, self._reasons = [], []

    def _lengthen(self, num_steps: int) -> None:
        """Let each request rest so many steps more by itself."""
        for request in self._requests:
            if request.acceptance is not None:
                request.acceptance.num_idle += num_steps
