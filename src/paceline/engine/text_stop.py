"""Finds stop strings in the text of generated tokens, across token borders."""

from collections.abc import Sequence

from paceline.tokenizer.tokenizer import IncrementalDetokenizer


class TextStop:
    """Collects a request's text and ends it at the first stop string. Text that may begin a stop string is held until that is decided.

    Attributes:
        found: the stop string that ended the text; None = none.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str], *, include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self._shown: list[str] = []
        self._num_taken = 0
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.found is not None

    @property
    def can_stop(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop)

    def copy(self) -> "TextStop":
        """Return a copy for a lookahead, whose text begins at the current position."""
        other = TextStop(self._detokenizer.copy(), self._stop, include_stop=self._include_stop)
        other._held, other.found = self._held, self.found
        return other

    @property
    def text(self) -> str:
        """All text that is final."""
        return "".join(self._shown)

    def take_new(self) -> str:
        """Return the text that became final since the last call."""
        new = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return new

    def push(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is complete, so that the request ends."""
        self._take(self._detokenizer.push(token_id))
        return self.is_stopped

    def finish(self) -> str:
        """End the text, because no token follows, and return all of it."""
        if not self.is_stopped:
            self._take(self._detokenizer.flush())
            self._show(len(self._held))
        return self.text

    def _take(self, piece: str) -> None:
        self._held += piece
        # stop strings are searched in the text, so tokens may end anywhere in them
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._show(at + len(stop) if self._include_stop else at)
            self._held = ""
            self.found = stop
            return
        self._show(len(self._held) - self._possible_stop_len())

    def _possible_stop_len(self) -> int:
        """Return the length of the longest end of the text that could begin a stop string."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _show(self, length: int) -> None:
        if length:
            self._shown.append(self._held[:length])
        self._held = self._held[length:]
