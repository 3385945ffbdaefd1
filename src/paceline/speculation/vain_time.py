"""Time that was spent on thinking of a batch's guesses and brought nothing: a small share of all time, so the dearer it is, the longer the
batch rests between.

What a step takes besides its pass does not shrink with the model: of one that takes 2 ms asking 16 requests takes a fifth, of one that
takes 100 ms next to nothing.
"""

SHARE = 0.005  # of all time
FREE = 0.25  # steps' worth of it that may be spent at once
MOST = 0.125  # that one step may count as: the first guesses of a drafter are asked for before anything is known of it
LONGEST_REST = 31  # steps


class VainTime:
    """What was spent lately beyond that share, in plain steps; it holds from one batch to the next."""

    def __init__(self) -> None:
        self._spent, self._step = 0.0, 0

    def add(self, step: int, spent: float) -> int:
        """Told in a step what it took longer than a plain one for nothing, as a share of that.

        Args:
            step: its number.
            spent: less than 0 where it was of use.

        Returns:
            steps to rest, a power of 2, less 1.
        """
        most = FREE + LONGEST_REST * SHARE
        self._spent = min(max(0.0, self._spent - SHARE * (step - self._step)) + min(spent, MOST), most)
        self._step = step
        due = int((self._spent - FREE) / SHARE) if self._spent > FREE else 0
        return (1 << (due + 1).bit_length() - 1) - 1

    def forget(self) -> None:
        """Guesses are of use: nothing was in vain."""
        self._spent = 0.0
