"""OpenAI's harmony: messages with a header, which names a channel and perhaps whom the message is for. gpt-oss."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import emit_json_object
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class HarmonyReader:
    """Reads a whole answer; the prompt ends within its first header, behind the role.

    Args:
        has_thoughts: whether the channel `analysis` is thoughts; else it is text.
        has_calls: whether messages to functions are calls; else they are text.
    """

    has_thoughts: bool
    has_calls: bool

    def read(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Read to the end."""
        while True:
            yield from stream.skip()
            opening = yield from stream.one_of((CHANNEL, "to=", START))
            if opening is None:
                stream.at = stream.num_emitted
                if (yield from stream.emit_until((START, CHANNEL), sink.text)) is None:
                    return
                continue
            stream.mark_emitted()
            stream.at += len(opening)
            try:
                yield from self._message(opening, stream, sink)
            except MalformedError:
                sink.text(stream.unemitted)
            stream.mark_emitted()

    def _message(self, opening: str, stream: TextStream, sink: EventSink) -> Parse[None]:
        header = opening + (yield from stream.until(MESSAGE))
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and self.has_calls and recipient[1].startswith(_FUNCTIONS) and sink.can_call:
            yield from _call(stream, sink, recipient[1].removeprefix(_FUNCTIONS))
        elif recipient is None and channel is not None and channel[1] in ("analysis", "commentary", "final"):
            stream.mark_emitted()
            is_thought = self.has_thoughts and channel[1] == "analysis"
            yield from _told_to_the_end(stream, sink.reasoning if is_thought else sink.text)
        else:  # to somebody we do not know
            yield from _told_to_the_end(stream, sink.text)


def _call(stream: TextStream, sink: EventSink, name: str) -> Parse[None]:
    yield from stream.skip()
    if not name or (yield from stream.peek()) != "{":
        raise MalformedError
    stream.mark_emitted()
    with sink.call(name):
        yield from emit_json_object(stream, sink.arguments)
    stream.mark_emitted()
    yield from stream.skip(WHITESPACE)
    yield from stream.take_or_end(ENDS[1])


def _told_to_the_end(stream: TextStream, say: Callable[[str], None]) -> Parse[None]:
    if stream.unemitted:
        say(stream.unemitted)
        stream.mark_emitted()
    end = yield from stream.emit_until((*ENDS, START), say)
    if end is not None and end != START:
        stream.at += len(end)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """One call, which ends the answer, perhaps with thoughts in front of it."""
    opening, closing = grammar.text(f"{CHANNEL}analysis{MESSAGE}"), grammar.text(f"{START}assistant")
    thoughts = f"{opening} {grammar.until(ENDS[0])} {closing}"
    heads = [f"{CHANNEL}commentary to={_FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}" for tool in tools]
    calls = [grammar.call(head, tool) for head, tool in zip(heads, tools, strict=True)]
    return f"({thoughts})? {grammar.one_of(calls)}"
