"""What steps take besides guessing, and what they bring: learned as they run."""

from collections.abc import Sequence

from paceline.runtimes.pass_costs import PassCosts, PassTable
from paceline.speculation.pass_work import PassWork
from paceline.speculation.work_times import LinearTime

BROUGHT_MEMORY = 0.97  # of what steps brought, from one to the next


class StepTimes:
    """Seconds of steps.

    Args:
        table: what passes cost, measured before.

    Attributes:
        costs: of passes.
        host: seconds of the other work, by requests and guessed rows.
        planning: seconds of deciding how much to guess, by requests that are decided for.
        rested: seconds of the other work of steps that all requests of a batch rest, by these.
        idle_s: other work of a lone request's step in which nobody is asked; None = none was seen.
    """

    def __init__(self, table: PassTable) -> None:
        self.costs = PassCosts(table)
        self.host = LinearTime()
        self.planning = LinearTime()
        self.rested = LinearTime()
        self.idle_s: float | None = None
        self._brought, self._spent_s = 0.0, 0.0  # tokens of the last steps, and seconds that such steps take

    @property
    def rate(self) -> float:
        """Tokens a second of the last steps; 0 before there was one."""
        return self._brought / self._spent_s if self._spent_s > 0.0 else 0.0

    def of_guesses(self, work: PassWork, first: int, most: int) -> list[float]:
        """Seconds of a step without guessing, by its guessed rows from `first` on, up to `most` more."""
        times, row_s = self.costs.row_times(work.num_rows, first + most, work.num_cached, work.num_row_cached)
        row_s = row_s * work.num_cached / max(1, work.num_sequences) + self.host.at(0.0, 1.0)
        host_s = self.host.at(work.num_sequences, 0.0)
        return [times[count] + host_s + count * row_s for count in range(first, first + most + 1)]

    def note(self, work: PassWork, passes_s: Sequence[float], hosts_s: Sequence[float], brought: float, num_steps: float) -> None:
        """Learn what steps of the same work took; nothing where prompts were among it.

        Args:
            work: guessed rows included.
            passes_s, hosts_s: of some of the steps, in order.
            brought: tokens of all of them.
            num_steps: how many they are.
        """
        if not work.is_decoding or not passes_s:
            return
        self.costs.kind = work.kind
        self.costs.observe_several(work.num_rows, work.num_cached, work.num_row_cached, passes_s)
        self.host.observe_several(work.num_sequences, work.num_rows - work.num_sequences, hosts_s)
        seconds = sum(hosts_s) / len(hosts_s) + self.costs.at(work.num_rows, work.num_cached, work.num_row_cached)
        kept = BROUGHT_MEMORY ** len(passes_s)
        self._brought = kept * self._brought + brought
        self._spent_s = kept * self._spent_s + num_steps * seconds

    def note_rested(self, num_requests: int, hosts_s: Sequence[float]) -> None:
        """Learn what the other work of steps took that all requests rested."""
        if num_requests > 1:
            self.rested.observe_several(1.0, num_requests, hosts_s)

    def more_than_idle_s(self, num_requests: int, host_s: float) -> float:
        """Seconds that the other work of a batch's step took longer than of one that all rest; 0 where none was seen."""
        return max(0.0, host_s - self.rested.at(1.0, num_requests)) if self.rested.is_known else 0.0

    def note_idle(self, other_s: float) -> None:
        """Learn what the other work of a lone request's step took in which nobody was asked."""
        known = other_s if self.idle_s is None else self.idle_s
        self.idle_s = 0.9 * known + 0.1 * (other_s if other_s < 2.0 * known else 2.0 * known)

    def saved_s(self, plain_s: float, taken_s: float, num_kept: float, other_s: float) -> float:
        """Seconds that a lone request's step saved by asking a drafter that takes next to no time.

        Args:
            plain_s: of a pass without guesses.
            taken_s: that its guesses made the pass longer.
            num_kept: of them, or how many were expected to be.
            other_s: all but the pass; what it is longer than that of idle steps was taken by asking.
        """
        asking_s = 0.0 if self.idle_s is None else max(0.0, other_s - self.idle_s)
        return num_kept * plain_s - taken_s - min(asking_s, 0.2 * plain_s)
