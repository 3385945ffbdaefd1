"""<tool_calls><tool_call>name<tool_sep><arg_key>…</arg_key><arg_value>…</arg_value></tool_call></tool_calls>: Hunyuan 3.

Hunyuan 4 leaves out <tool_sep> and the line ends. The published Hunyuan 3 has a suffix in each tag: <tool_calls:opensource>.
"""

from collections.abc import Sequence

from paceline.parsing.events import EventSink
from paceline.parsing.formats import ToolCallFormat, including_mark, section_of
from paceline.parsing.lenient_json import emit_json_object
from paceline.parsing.reasoning import reasoning_format
from paceline.parsing.tagged_calls import LINE_END, TaggedCallFormat
from paceline.parsing.text_stream import NAME_CHARACTER, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tools import Tool


class Hunyuan3:
    """Reads calls and builds their grammar.

    Args:
        suffix: the end of each tag's name.
    """

    def __init__(self, suffix: str = "") -> None:
        self._open, self._close = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
        self._call, self._call_end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
        self._key, self._key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        self._value, self._value_end = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
        self._separator = f"<tool_sep{suffix}>"
        self._tags = TaggedCallFormat(
            open=self._open,
            close=self._close,
            function=self._call,
            function_end=self._call_end,
            parameter=self._key,
            key_end=self._key_end,
            value=self._value,
            parameter_end=self._value_end,
        )

    def format_of(self, signs: tuple[str, ...]) -> ToolCallFormat:
        """Return the format that these texts in a chat template show."""
        read_calls = section_of(self._call, self._read_call, self._close)
        anywhere = {self._open: read_calls, self._call: including_mark(read_calls, len(self._call))}
        tags = (self._open, self._close, self._call, self._separator, self._call_end, self._key, self._key_end, self._value)
        return ToolCallFormat(anywhere, signs, (*tags, self._value_end), self.calls_grammar, self._open)

    def _read_call(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        yield from stream.skip()
        name = yield from stream.matching(NAME_CHARACTER)
        yield from stream.skip()
        has_separator = yield from stream.take(self._separator)
        yield from stream.skip()
        if not name or not (has_separator or (sink.has_tool(name) and (yield from stream.one_of((self._key, self._call_end))))):
            raise MalformedError
        stream.mark_emitted()
        with sink.call(name):
            if (yield from stream.peek()) == "{":
                yield from emit_json_object(stream, sink.arguments)
            else:
                sink.arguments("{")
                yield from self._tags.read_parameters(stream, sink, sink.schema_of(name))
            stream.mark_emitted()
        yield from stream.skip()
        yield from stream.take_or_end(self._call_end)
        yield from stream.skip()
        stream.mark_emitted()

    def calls_grammar(self, grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str:
        """Build the grammar. Arguments come in the schema's order."""
        separator = "" if self._key in grammar.token_ids and self._separator not in grammar.token_ids else self._separator
        heads = [grammar.literal(f"{self._call}{tool.name}{separator}") for tool in tools]
        end = f"{grammar.literal(self._call_end)} {LINE_END}"
        calls = [f"{head} {self._tags.pairs_grammar(grammar, tool)} {end}" for head, tool in zip(heads, tools, strict=True)]
        return f"{grammar.literal(self._open)} {LINE_END} {grammar.listed(calls, '', several=several)} {grammar.literal(self._close)}"


_SUFFIX = ":opensource"
FORMAT = Hunyuan3().format_of(("<tool_calls>", "<arg_key>"))
SUFFIX_FORMAT = Hunyuan3(_SUFFIX).format_of(("<tool_calls{}>", _SUFFIX))
SUFFIX_REASONING_FORMAT = reasoning_format(f"<think{_SUFFIX}>", f"</think{_SUFFIX}>", ("</think{}>", _SUFFIX))
