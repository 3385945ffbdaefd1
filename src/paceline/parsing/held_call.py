"""Holds back the arguments of a call while it may still prove to be text."""

from contextlib import ExitStack

from paceline.parsing.event_sink import EventSink
from paceline.parsing.text_stream import TextStream

MAX_HELD_CHARS = 256
"""Arguments up to this size are passed on with the end of their call: until then a faulty call can still become text."""


class HeldCall:
    """Hold a call back until it is whole or long.

    Args:
        stack: keeps the call open in the sink.

    Attributes:
        name: the tool's name.
        is_open: whether the sink has the beginning of the call.
        num_emitted: number of characters of arguments that the sink has.
    """

    def __init__(self, stream: TextStream, sink: EventSink, stack: ExitStack) -> None:
        self._stream, self._sink, self._stack = stream, sink, stack
        self._start = len(stream.unemitted)
        self._held: list[str] = []
        self._source: list[str] = []
        self._num_held = self.num_emitted = 0
        self.name = ""
        self.is_open = False

    def emit(self, json: str) -> None:
        """Add the next characters of the arguments."""
        self._held.append(json)
        self._num_held += len(json)
        if self.is_open or self._num_held > MAX_HELD_CHARS:
            self.open()

    def open(self) -> None:
        """Begin the call in the sink and emit all characters held back."""
        if not self.is_open:
            self._stack.enter_context(self._sink.call(self.name))
            self.is_open = True
        self._sink.arguments("".join(self._held))
        self.num_emitted += self._num_held
        self._held, self._num_held = [], 0
        self._source.append(self._stream.unemitted[self._start :])
        self._start = 0
        self._stream.mark_emitted()

    def end(self) -> None:
        """End the call in the sink."""
        self._stack.close()

    @property
    def source(self) -> str:
        """Return the text of the call that was passed so far."""
        return "".join(self._source) + self._stream.unemitted[self._start :]
