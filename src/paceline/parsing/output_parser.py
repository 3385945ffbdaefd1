"""Parses an answer whose reasoning and calls are between marks, with the parser that belongs to each mark."""

from dataclasses import dataclass

from paceline.parsing.event_sink import EventSink
from paceline.parsing.formats import Format, ParseMarkup
from paceline.parsing.reasoning import ReasoningReader
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Parses a whole answer.

    White space between markup, and between markup and text, is markup.

    Args:
        reasoning, calls: the formats of either.
        opened: parses reasoning that the prompt has begun; None = it has not.
    """

    reasoning: Format
    calls: Format
    opened: ParseMarkup | None = None

    def read(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse to the end of the text."""
        follows_markup = self.opened is not None and (yield from self._parse(self.opened, stream, sink))
        while True:
            parser = yield from self._parser_of_first(stream, sink, follows_markup=follows_markup)
            if parser is None:
                parsers = self._parsers_anywhere(sink)
                marker = yield from stream.emit_until(tuple(parsers), sink.text, held=WHITESPACE if parsers else "")
                if marker is None:
                    return
                stream.at += len(marker)
                parser = parsers[marker]
            follows_markup = yield from self._parse(parser, stream, sink)

    def _parser_of_first(self, stream: TextStream, sink: EventSink, *, follows_markup: bool) -> Parse[ParseMarkup | None]:
        """Pass the mark before the text and return its parser. White space is passed with it; after markup it is passed in any case."""
        parsers = self._parsers_anywhere(sink)
        if not sink.has_text and not sink.num_calls:
            parsers |= {} if follows_markup else self.reasoning.first
            parsers |= self.calls.first if sink.can_call else {}
        if not parsers and not follows_markup:
            return None
        yield from stream.skip()
        marker = yield from stream.one_of(tuple(parsers))
        if follows_markup:
            stream.mark_emitted()
        if marker is None:
            stream.at = stream.num_emitted
            return None
        stream.at += len(marker)
        return parsers[marker]

    def _parsers_anywhere(self, sink: EventSink) -> dict[str, ParseMarkup]:
        return {**self.reasoning.anywhere, **(self.calls.anywhere if sink.can_call else {})}

    def _parse(self, parser: ParseMarkup, stream: TextStream, sink: EventSink) -> Parse[bool]:
        """Return whether markup was parsed; otherwise its text was emitted."""
        begin = stream.position
        try:
            if isinstance(parser, ReasoningReader):
                yield from parser(stream, sink, dict(self.calls.anywhere) if sink.can_call else {})
            else:
                yield from parser(stream, sink)
            return True
        except MalformedError:
            stream.pass_to(begin)  # a parser may go back to the mark, which is text now
            sink.text(stream.unemitted)
            return False
        finally:
            stream.mark_emitted()
