"""How many of the lately drafted tokens were accepted: of one request, or of all together."""

from collections import deque
from dataclasses import dataclass, field

WINDOW = 64  # drafted tokens that count
MIN_EVIDENCE = 24  # drafted tokens from which on they are judged
CLEAR_STEPS = 4  # steps with drafts from which on they are judged where nothing was accepted


@dataclass(slots=True)
class DraftHistory:
    """(drafted, accepted) of each step with drafts, over the last `WINDOW` drafted tokens.

    Attributes:
        steps: oldest first.
        drafted, accepted: their sums.
        num_plain: plain steps since drafting stopped to pay.
        min_evidence: drafted tokens from which on it is judged; 1 for a probe.
        was_probed: whether drafting was off before and this began with a probe.
    """

    steps: deque[tuple[int, int]] = field(default_factory=deque)
    drafted: int = 0
    accepted: int = 0
    num_plain: int = 0
    min_evidence: int = MIN_EVIDENCE
    was_probed: bool = False

    @property
    def has_evidence(self) -> bool:
        """Whether enough is known to judge."""
        return (self.accepted == 0 and len(self.steps) >= CLEAR_STEPS) or self.drafted >= self.min_evidence

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count one step; the oldest ones are dropped."""
        self.steps.append((num_drafted, num_accepted))
        self.drafted += num_drafted
        self.accepted += num_accepted
        while self.drafted - self.steps[0][0] >= WINDOW:
            drafted, accepted = self.steps.popleft()
            self.drafted -= drafted
            self.accepted -= accepted

    def accepted_per_step(self, depth: int) -> float:
        """Accepted tokens a step with drafts of `depth` tokens.

        Shorter drafts are extrapolated: as if every token were accepted with the same chance once those before it were.
        """
        drafted, accepted = self.drafted / len(self.steps), self.accepted / len(self.steps)
        if drafted >= depth or accepted == 0:
            return accepted
        low, high = 0.0, 1.0
        for _ in range(10):
            chance = (low + high) / 2
            low, high = (chance, high) if expected_accepted(chance, drafted) < accepted else (low, chance)
        return expected_accepted(high, depth)


def expected_accepted(chance: float, depth: float) -> float:
    """Accepted tokens to be expected of a chain of `depth`, each accepted with this chance if those before it were."""
    return depth if chance == 1.0 else chance * (1.0 - chance**depth) / (1.0 - chance)
