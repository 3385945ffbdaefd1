"""When a drafter that failed is asked again: at once, then after ever longer breaks."""

LONGEST_BREAK = 64


class Backoff:
    """Counts failures in a row; the n-th costs a break of 2 ** (n - 1) - 1 calls, at most LONGEST_BREAK."""

    def __init__(self) -> None:
        self._num_failures = self._num_to_skip = 0

    def is_due(self) -> bool:
        """Whether to ask now; asked once before every call."""
        if self._num_to_skip == 0:
            return True
        self._num_to_skip -= 1
        return False

    def note(self, *, failed: bool) -> None:
        """Told what became of a call."""
        self._num_failures = self._num_failures + 1 if failed else 0
        self._num_to_skip = min(LONGEST_BREAK, 2 ** min(self._num_failures, 10) // 2 - 1) if failed else 0
