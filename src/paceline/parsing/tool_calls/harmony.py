"""Messages whose header has a channel and perhaps a recipient: gpt-oss."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ReasoningFormat, ToolCallFormat
from paceline.parsing.json_call import emit_arguments, skip_closers
from paceline.parsing.text_stream import NAME_CHARACTER, WHITESPACE, Emit, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."
_NO_TOOLS = ("assistant", "user")  # recipients of messages that are no calls
_TO_FUNCTION = f"to={_FUNCTIONS}"
_WRITTEN_HEADERS = tuple(f"{words}{_TO_FUNCTION}" for words in ("assistantcommentary ", "assistant commentary ", "commentary ", ""))
_TYPES = (CONSTRAIN, "json", "code", CHANNEL, "commentary", MESSAGE)


@dataclass(frozen=True, slots=True)
class HarmonyReader:
    """Parses a whole answer; the prompt ends within its first header, after the role.

    Args:
        has_reasoning: whether the channel `analysis` is reasoning; otherwise it is text.
        has_calls: whether messages to functions are calls; otherwise they are text.
    """

    has_reasoning: bool
    has_calls: bool

    def read(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse to the end of the text."""
        while True:
            yield from stream.skip()
            opening = yield from stream.one_of((CHANNEL, "to=", START))
            if opening is None:
                stream.at = stream.num_emitted
                if (yield from self._emit_text((START, CHANNEL), stream, sink)) is None:
                    return
                continue
            stream.mark_emitted()
            stream.at += len(opening)
            try:
                yield from self._read_message(opening, stream, sink)
            except MalformedError:
                sink.text(stream.unemitted)
            stream.mark_emitted()

    def _read_message(self, opening: str, stream: TextStream, sink: EventSink) -> Parse[None]:
        header = opening + (yield from self._read_header(stream))
        recipient, channels = _RECIPIENT.search(header), _CHANNEL.findall(header)
        if recipient is not None and recipient[1] in _NO_TOOLS:
            recipient = None
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        is_function = recipient is not None and (name != recipient[1] or name in sink.tool_names)
        if is_function and self.has_calls and sink.can_call:
            yield from _read_call(stream, sink, name)
        elif recipient is None and channels and channels[-1] in ("analysis", "commentary", "final"):
            stream.mark_emitted()
            if self.has_reasoning and channels[-1] == "analysis":
                yield from _emit_to_end(stream, sink.reasoning)
            else:
                yield from self._emit_text((*ENDS, START), stream, sink)
        elif recipient is not None and not is_function:  # a call of a built-in tool of gpt-oss, such as python
            stream.mark_emitted()
            yield from _emit_to_end(stream, sink.reasoning if self.has_reasoning else sink.text)
        else:
            yield from _emit_to_end(stream, sink.text)

    def _read_header(self, stream: TextStream) -> Parse[str]:
        """Pass the header and <|message|>, which may be missing before the arguments of a call."""
        header = ""
        while not (yield from stream.take(MESSAGE)):
            char = yield from stream.peek()
            if char == "" or len(header) > 256 or (char == "{" and "to=" in header):
                if char == "{":
                    break
                raise MalformedError
            header += char
            stream.at += 1
        return header

    def _emit_text(self, ends: tuple[str, ...], stream: TextStream, sink: EventSink) -> Parse[str | None]:
        """Emit text up to the end of a message, with the calls whose header is written without markup; returns what ended it."""
        while True:
            headers = _WRITTEN_HEADERS if self.has_calls and sink.can_call else ()
            end = yield from stream.emit_until((*ends, *headers), sink.text, held=WHITESPACE)
            if end is None or end not in headers:
                sink.text(stream.unemitted)
                stream.mark_emitted()
                if end in ENDS:
                    stream.at += len(end)
                return end
            stream.at += len(end)
            try:
                yield from self._read_written_call(stream, sink)
            except MalformedError:
                sink.text(stream.unemitted)
            stream.mark_emitted()

    def _read_written_call(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse a call after its header, which is text: to=functions.name json {…}."""
        name = yield from stream.matching(NAME_CHARACTER)
        yield from stream.skip()
        while (word := (yield from stream.one_of(_TYPES))) is not None:
            stream.at += len(word)
            yield from stream.skip()
        if not name or not sink.has_tool(name) or (yield from stream.peek()) != "{":
            raise MalformedError
        yield from _read_call(stream, sink, name)


def _read_call(stream: TextStream, sink: EventSink, name: str) -> Parse[None]:
    yield from stream.skip()
    if not name:
        raise MalformedError
    if (yield from stream.one_of(ENDS)) is not None:  # no arguments
        with sink.call(name):
            stream.mark_emitted()
    else:
        yield from emit_arguments(stream, sink, name)
    yield from skip_closers(stream)
    for end in ENDS:
        yield from stream.take_or_end(end)


def _emit_to_end(stream: TextStream, emit: Emit) -> Parse[None]:
    """Emit what was passed and the text up to the end of a message."""
    if stream.unemitted:
        emit(stream.unemitted)
        stream.mark_emitted()
    end = yield from stream.emit_until((*ENDS, START), emit)
    if end is not None and end != START:
        stream.at += len(end)


def calls_grammar(grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """Return a grammar of one call, which ends the answer, perhaps after reasoning."""
    opening, closing = grammar.literal(f"{CHANNEL}analysis{MESSAGE}"), grammar.literal(f"{START}assistant")
    reasoning = f"{opening} {grammar.until(ENDS[0])} {closing}"
    heads = [f"{CHANNEL}commentary to={_FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}" for tool in tools]
    calls = [grammar.call(head, tool) for head, tool in zip(heads, tools, strict=True)]
    return f"({reasoning})? {grammar.one_of(calls)}"


TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
# HarmonyReader parses the whole answer, so that there are no markers
FORMAT = ToolCallFormat({}, (CHANNEL, MESSAGE), TOKENS, calls_grammar, text_signs=(_TO_FUNCTION,))
REASONING_FORMAT = ReasoningFormat({}, (CHANNEL, MESSAGE), TOKENS)
