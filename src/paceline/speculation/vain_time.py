"""Time that was spent on thinking of a batch's guesses and brought nothing: a small share of all time, so the dearer it is, the longer the
batch rests between.

What a step takes besides its pass does not shrink with the model: of one that takes 2 ms asking 16 requests takes a fifth, of one that
takes 100 ms next to nothing.
"""

from typing import NamedTuple

FREE = 0.25  # steps' worth of it that may be spent at once
MOST = 0.25  # that one step may count as: the first guesses of a drafter are asked for before anything is known of it


class Limits(NamedTuple):
    """What may be spent in vain.

    Attributes:
        share: of all time.
        longest_rest: in steps, a power of 2, less 1.
    """

    share: float
    longest_rest: int


OF_COPIES = Limits(0.004, 31)
"""Where a drafter copies, or takes next to no time: a copy may begin at any token."""
OF_OTHERS = Limits(0.002, 63)
"""Where none does: what is expected of their guesses changes with probes alone."""


class VainTime:
    """What was spent lately beyond that share, in plain steps; it holds from one batch to the next."""

    def __init__(self) -> None:
        self._spent, self._step = 0.0, 0

    def add(self, step: int, spent: float, limits: Limits) -> int:
        """Told in a step what it took longer than a plain one for nothing, as a share of that.

        Args:
            step: its number.
            spent: less than 0 where it was of use.
            limits: of now.

        Returns:
            steps to rest, a power of 2, less 1.
        """
        share, longest = limits
        left = max(0.0, self._spent - share * (step - self._step))
        self._spent, self._step = min(left + min(spent, MOST), FREE + longest * share), step
        due = int((self._spent - FREE) / share) if self._spent > FREE else 0
        return (1 << (due + 1).bit_length() - 1) - 1

    def forget(self) -> None:
        """Guesses are of use: nothing was in vain."""
        self._spent = 0.0
