"""Finds stop strings in the text of generated tokens, even if a stop string begins or ends within a token."""

from collections.abc import Sequence

from paceline.tokenizer.tokenizer import IncrementalDetokenizer


class StopStringMatcher:
    """Collects the text of a request and ends the text at the first stop string.

    While the end of the text may be the beginning of a stop string, that part is held back.

    Attributes:
        matched_stop: the first stop string in the text; None = none so far.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str], *, include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held_back = ""
        self._emitted: list[str] = []
        self._num_taken = 0
        self.matched_stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.matched_stop is not None

    @property
    def can_stop(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop)

    def copy(self) -> "StopStringMatcher":
        """Return a copy, to test possible next tokens. The copy's `text` contains only text of tokens that are pushed to the copy."""
        other = StopStringMatcher(self._detokenizer.copy(), self._stop, include_stop=self._include_stop)
        other._held_back, other.matched_stop = self._held_back, self.matched_stop
        return other

    @property
    def text(self) -> str:
        """All text so far, except the part that is held back."""
        return "".join(self._emitted)

    def take_new_text(self) -> str:
        """Return the text that was added to `text` since the last call."""
        new = "".join(self._emitted[self._num_taken :])
        self._num_taken = len(self._emitted)
        return new

    def push(self, token_id: int) -> bool:
        """Add a token. Return whether a stop string was found, at which the request ends."""
        self._add_text(self._detokenizer.push(token_id))
        return self.is_stopped

    def finish(self) -> str:
        """Return all text. Call this after the last token: text that was held back is then included."""
        if not self.is_stopped:
            self._add_text(self._detokenizer.flush())
            self._emit(len(self._held_back))
        return self.text

    def _add_text(self, text: str) -> None:
        self._held_back += text
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := self._held_back.find(stop)) >= 0]
        if matches:
            _, start, stop = min(matches)
            self._emit(start + len(stop) if self._include_stop else start)
            self._held_back = ""
            self.matched_stop = stop
            return
        self._emit(len(self._held_back) - self._partial_stop_len())

    def _partial_stop_len(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = min(max(map(len, self._stop), default=0) - 1, len(self._held_back))
        suffixes = (self._held_back[-num_chars:] for num_chars in range(longest, 0, -1))
        return next((len(suffix) for suffix in suffixes if any(stop.startswith(suffix) for stop in self._stop)), 0)

    def _emit(self, num_chars: int) -> None:
        if num_chars:
            self._emitted.append(self._held_back[:num_chars])
        self._held_back = self._held_back[num_chars:]
