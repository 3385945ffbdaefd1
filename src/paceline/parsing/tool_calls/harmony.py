"""OpenAI's harmony: messages with a header, which names a channel and perhaps whom the message is for. gpt-oss."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.parsing.event_sink import Writer
from paceline.parsing.lenient_json import json_object
from paceline.parsing.text_stream import SPACE, MalformedError, Reading, Source
from paceline.parsing.tool_call_grammar import CallGrammar
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

    def read(self, source: Source, writer: Writer) -> Reading[None]:
        """Read to the end."""
        while True:
            yield from source.skip()
            opening = yield from source.one_of((CHANNEL, "to=", START))
            if opening is None:
                source.at = source.told
                if (yield from source.told_until((START, CHANNEL), writer.text)) is None:
                    return
                continue
            source.settle()
            source.at += len(opening)
            try:
                yield from self._message(opening, source, writer)
            except MalformedError:
                writer.text(source.untold)
            source.settle()

    def _message(self, opening: str, source: Source, writer: Writer) -> Reading[None]:
        header = opening + (yield from source.until(MESSAGE))
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None and self.has_calls and recipient[1].startswith(_FUNCTIONS) and writer.may_call:
            yield from _call(source, writer, recipient[1].removeprefix(_FUNCTIONS))
        elif recipient is None and channel is not None and channel[1] in ("analysis", "commentary", "final"):
            source.settle()
            is_thought = self.has_thoughts and channel[1] == "analysis"
            yield from _told_to_the_end(source, writer.reasoning if is_thought else writer.text)
        else:  # to somebody we do not know
            yield from _told_to_the_end(source, writer.text)


def _call(source: Source, writer: Writer, name: str) -> Reading[None]:
    yield from source.skip()
    if not name or (yield from source.peek()) != "{":
        raise MalformedError
    source.settle()
    with writer.call(name):
        yield from json_object(source, writer.arguments)
    source.settle()
    yield from source.skip(SPACE)
    yield from source.take_end(ENDS[1])


def _told_to_the_end(source: Source, say: Callable[[str], None]) -> Reading[None]:
    if source.untold:
        say(source.untold)
        source.settle()
    end = yield from source.told_until((*ENDS, START), say)
    if end is not None and end != START:
        source.at += len(end)


def calls_grammar(grammar: CallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
    """One call, which ends the answer, perhaps with thoughts in front of it."""
    opening, closing = grammar.text(f"{CHANNEL}analysis{MESSAGE}"), grammar.text(f"{START}assistant")
    thoughts = f"{opening} {grammar.until(ENDS[0])} {closing}"
    heads = [f"{CHANNEL}commentary to={_FUNCTIONS}{tool.name} {CONSTRAIN}json{MESSAGE}" for tool in tools]
    calls = [grammar.call(head, tool) for head, tool in zip(heads, tools, strict=True)]
    return f"({thoughts})? {grammar.one_of(calls)}"
