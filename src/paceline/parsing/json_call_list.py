"""Parses calls that are JSON objects between two marks: a list of objects, or one object per pair of marks.

Many model families differ only in the marks and in the layout, so that a format is one `JsonCallList`.
"""

import json
from dataclasses import dataclass

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import BuildCallGrammar, ParseMarkup, ToolCallFormat, call_list, including_mark
from paceline.parsing.json_call import read_json_calls
from paceline.parsing.text_stream import Parse, TextStream
from paceline.parsing.tools import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCallList:
    """Describes the calls of a model family.

    Parsing accepts a list or single objects, in a code fence or not, with the end mark or without.

    Attributes:
        open_marks: marks that begin calls; the grammar writes the first. A "[" at a mark's end is the list's.
        close_marks: marks that end calls.
        only_known: whether calls must have arguments and name an offered tool. For marks that may also begin ordinary text.
        before, between, after: texts around and between the calls, as the model was trained on them.
        head, tail: texts around the arguments of one call; "NAME" in `head` is replaced by the quoted name.
    """

    open_marks: tuple[str, ...]
    close_marks: tuple[str, ...] = ()
    only_known: bool = False
    before: str = ""
    between: str = ", "
    after: str = ""
    head: str = '{"name": NAME, "arguments": '
    tail: str = "}"

    @property
    def parsers(self) -> dict[str, ParseMarkup]:
        """The opening marks with their parsers."""
        return {mark: including_mark(self.read_calls, mark.endswith("[")) for mark in self.open_marks}

    def read_calls(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse the calls and the end mark.

        Raises:
            MalformedError: the text is no call.
        """
        yield from read_json_calls(stream, sink, only_known=self.only_known)
        while (yield from stream.peek()) != "" and (yield from self._take_close(stream)):  # models may repeat the end mark
            yield from stream.skip()

    def _take_close(self, stream: TextStream) -> Parse[bool]:
        """Pass an end mark, or the beginning of one at the end of the text. Return whether there was one."""
        for mark in self.close_marks:
            if (yield from stream.take_or_end(mark)):
                return True
        return False

    def format_of(self, signs: tuple[str, ...], tokens: tuple[str, ...]) -> ToolCallFormat:
        """Return the format of these calls, which begin with the first of `tokens`."""
        return ToolCallFormat(self.parsers, signs, tokens, self.calls_grammar, tokens[0])

    @property
    def calls_grammar(self) -> BuildCallGrammar:
        """Function that builds the grammar of the calls and of the marks around them."""
        before, after = self.open_marks[0].removesuffix("[") + self.before, self.after
        if not self.before:  # no text surrounds a list of calls, so that each call is between marks of its own
            return call_list(lambda grammar, tool: grammar.call(before + self.head_of(tool), tool, self.tail + after), self.between)
        return call_list(lambda grammar, tool: grammar.call(self.head_of(tool), tool, self.tail), self.between, before, after)

    def head_of(self, tool: Tool) -> str:
        """Return the text before the arguments of a call."""
        return self.head.replace("NAME", json.dumps(tool.name))
