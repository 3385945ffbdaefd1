"""Calls as XML elements whose attribute is the name: <function name="f"><param name="a">x</param></function>."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.parsing.argument_types import coerce_argument, is_text, parameter_schema
from paceline.parsing.argument_value import value_grammar
from paceline.parsing.event_sink import EventSink
from paceline.parsing.json_writer import JsonWriter
from paceline.parsing.lenient_json import escape_json
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar, arguments_schema
from paceline.parsing.tools import Tool

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_LIST, _LIST_END = "<arguments>", "</arguments>"
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}
_NAME_CHARACTER = re.compile(r"[^\s\"'<>]")


@dataclass(frozen=True, slots=True)
class AttributeXml:
    """Read elements.

    Args:
        function, parameter: what begins either element.
        function_end, parameter_end: what ends either.
        is_xml: whether values are those of XML: CDATA and entities are read, white space around them is markup.
    """

    function: str
    parameter: str
    function_end: str
    parameter_end: str
    is_xml: bool = False

    def read(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Pass a call whose beginning, before its attribute, is passed; the end of a parameter or the function may be missing.

        Raises:
            MalformedError: it is none.
        """
        name = _tool_name((yield from self._read_name(stream)), sink)
        yield from self._skip(stream, _LIST)
        if (yield from stream.one_of((self.parameter, self.function_end))) is None and (yield from stream.peek()) != "":
            raise MalformedError
        stream.mark_emitted()
        with sink.call(name):
            writer = JsonWriter(sink.arguments)
            writer.open("{", "}")
            try:
                yield from self._read_parameters(stream, sink, writer, name)
            except MalformedError:
                sink.arguments(writer.missing_end)
                raise
            writer.close()
            stream.mark_emitted()

    def _read_parameters(self, stream: TextStream, sink: EventSink, writer: JsonWriter, name: str) -> Parse[None]:
        before = ""
        while (yield from stream.take(self.parameter)):
            key = yield from self._read_name(stream)
            writer.put(f'{before}"{escape_json(key)}": ')
            before = ", "
            schema = parameter_schema(sink.schema_of(name), key)
            if is_text(schema):
                writer.open('"', '"')
                yield from self._read_value(stream, writer)
                writer.close()
            else:
                parts: list[str] = []
                yield from self._read_value(stream, JsonWriter(parts.append))
                writer.emit(coerce_argument("".join(parts), schema))
            stream.mark_emitted()
            yield from stream.skip()
        yield from self._skip(stream, _LIST_END)
        if not (yield from stream.take_or_end(self.function_end)):
            raise MalformedError

    def _skip(self, stream: TextStream, tag: str) -> Parse[None]:
        """Pass white space and, in XML, a tag that some models write around the parameters."""
        yield from stream.skip()
        if self.is_xml and (yield from stream.take(tag)):
            yield from stream.skip()

    def _read_name(self, stream: TextStream) -> Parse[str]:
        """Pass the rest of an opening tag; returns the attribute, with or without its quotes."""
        yield from stream.skip()
        yield from stream.expect("name=")
        quote = yield from stream.one_of(('"', "'"))
        if quote is None:
            name = yield from stream.matching(_NAME_CHARACTER)
        else:
            stream.at += 1
            name = yield from stream.until(quote)
        yield from stream.until(">")
        if not name or not name.isprintable() or "<" in name:
            raise MalformedError
        return name

    def _read_value(self, stream: TextStream, writer: JsonWriter) -> Parse[None]:
        """Pass a value and its end. The beginning of the next parameter and the end of the function end it too."""
        is_string = bool(writer.missing_end)

        def emit(text: str) -> None:
            writer.emit(escape_json(text) if is_string else text)

        stream.mark_emitted()
        markers: Sequence[str] = (self.parameter_end, self.parameter, self.function_end)
        if self.is_xml:
            yield from stream.skip()
            markers = (*markers, _CDATA, *_ENTITIES)
        while True:
            found = yield from stream.emit_until(markers, emit, held=WHITESPACE if self.is_xml else "")
            if found is None:
                raise MalformedError
            if found in _ENTITIES or found == _CDATA:
                emit(stream.unemitted)
                stream.at += len(found)
                if found == _CDATA:
                    if (yield from stream.emit_until((_CDATA_END,), emit)) is None:
                        raise MalformedError
                    stream.at += len(_CDATA_END)
                else:
                    emit(_ENTITIES[found])
                stream.mark_emitted()
                continue
            if found == self.parameter_end:
                stream.at += len(found)
            return


def _tool_name(name: str, sink: EventSink) -> str:
    """Return the tool's name, which some models write twice: f.f."""
    head, _, tail = name.partition(".")
    return head if head == tail and name not in sink.tool_names and head in sink.tool_names else name


def attribute_xml_grammar(grammar: ToolCallGrammar, tags: AttributeXml, tool: Tool, line_end: str = "") -> str:
    """Return a grammar of a call with its parameters in the schema's order. Of texts only their `enum` is enforced.

    Args:
        line_end: the text after each tag.
    """
    root = arguments_schema(tool)
    required, parts = root.get("required") or (), [grammar.text(f'{tags.function} name="{tool.name}">{line_end}')]
    for name in root.get("properties") or ():
        value = value_grammar(grammar, root, parameter_schema(root, name) or {}, tags.parameter_end + line_end)
        one = grammar.rule(f"{grammar.text(f'{tags.parameter} name={chr(34)}{name}{chr(34)}>')} {value}")
        parts.append(one if name in required else f"{one}?")
    return " ".join([*parts, grammar.text(tags.function_end)])
