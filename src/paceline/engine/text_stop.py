"""Finds stop strings in the text of generated tokens, even if a stop string begins or ends within a token."""

from collections.abc import Sequence

from paceline.tokenizer.tokenizer import IncrementalDetokenizer


class TextStop:
    """Collects the text of a request and ends it at the first stop string.

    The end of the text is held back while it may be the beginning of a stop string.

    Attributes:
        found: the stop string that was found; None = none so far.
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
        """Whether a stop string was found."""
        return self.found is not None

    @property
    def can_stop(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop)

    def copy(self) -> "TextStop":
        """Return a copy to test possible next tokens with. Its text contains only what is pushed to the copy."""
        other = TextStop(self._detokenizer.copy(), self._stop, include_stop=self._include_stop)
        other._held, other.found = self._held, self.found
        return other

    @property
    def text(self) -> str:
        """All text so far, except the part that is held back."""
        return "".join(self._shown)

    def take_new_text(self) -> str:
        """Return the text that was added to `text` since the last call."""
        new = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return new

    def push(self, token_id: int) -> bool:
        """Add a token; return whether a stop string was found, so that the request ends."""
        self._append(self._detokenizer.push(token_id))
        return self.is_stopped

    def finish(self) -> str:
        """Return all text. Call this after the last token: text that was held back is then included."""
        if not self.is_stopped:
            self._append(self._detokenizer.flush())
            self._release(len(self._held))
        return self.text

    def _append(self, piece: str) -> None:
        self._held += piece
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._release(at + len(stop) if self._include_stop else at)
            self._held = ""
            self.found = stop
            return
        self._release(len(self._held) - self._possible_stop_len())

    def _possible_stop_len(self) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        longest = min(max(map(len, self._stop), default=0) - 1, len(self._held))
        return next((length for length in range(longest, 0, -1) if any(stop.startswith(self._held[-length:]) for stop in self._stop)), 0)

    def _release(self, length: int) -> None:
        if length:
            self._shown.append(self._held[:length])
        self._held = self._held[length:]
