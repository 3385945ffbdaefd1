"""A call as one JSON object with the tool's name and its arguments."""

import json

from paceline.parsing.event_sink import EventSink
from paceline.parsing.lenient_json import emit_json_object, read_json_value, read_short_string
from paceline.parsing.text_stream import MalformedError, Parse, TextStream

_ARGUMENTS = ("arguments", "parameters")


def read_json_call(stream: TextStream, sink: EventSink, *, only_known: bool = False) -> Parse[None]:
    """Pass {"name": …, "arguments": {…}} and tell the call; "parameters" is another name of the arguments.

    Behind the arguments a missing brace is forgiven. Without arguments there is a call with none.

    Args:
        only_known: whether it must have arguments and name a tool that the model was told of; else it may be any JSON.

    Raises:
        MalformedError: it is no call.
    """
    yield from stream.skip()
    yield from stream.expect("{")
    name = held = None
    while True:
        yield from stream.skip()
        key = yield from read_short_string(stream)
        yield from stream.skip()
        yield from stream.expect(":")
        yield from stream.skip()
        if key == "name":
            name = yield from read_short_string(stream)
            if not name or (only_known and name not in sink.tool_names):
                raise MalformedError
        elif key in _ARGUMENTS and name is not None:
            yield from _tell_arguments(stream, sink, name)
            yield from _pass_rest(stream)
            return
        elif key in _ARGUMENTS:
            held = _object_text((yield from read_json_value(stream)))
        else:
            yield from read_json_value(stream)
        yield from stream.skip()
        if (yield from stream.take("}")):
            break
        yield from stream.expect(",")
    if name is None or (held is None and only_known):
        raise MalformedError
    with sink.call(name):
        sink.arguments("{}" if held is None else held)
    stream.mark_emitted()


def _tell_arguments(stream: TextStream, sink: EventSink, name: str) -> Parse[None]:
    char = yield from stream.peek()
    if char == "{":
        stream.mark_emitted()
        with sink.call(name):
            yield from emit_json_object(stream, sink.arguments)
        return
    text = _object_text((yield from read_json_value(stream)))
    stream.mark_emitted()
    with sink.call(name):
        sink.arguments(text)


def _object_text(value: str) -> str:
    """A JSON object, which may be given as a string that holds it.

    Raises:
        MalformedError: it is none.
    """
    try:
        given = json.loads(value)
        if isinstance(given, str):
            value, given = given, json.loads(given)
    except (ValueError, RecursionError):
        raise MalformedError from None
    if not isinstance(given, dict):
        raise MalformedError
    return value


def _pass_rest(stream: TextStream) -> Parse[None]:
    """What follows the arguments up to the brace, if it is as it should be; else nothing is passed."""
    yield from stream.skip()
    while (yield from stream.take(",")):
        yield from stream.skip()
        yield from read_short_string(stream)
        yield from stream.skip()
        yield from stream.expect(":")
        yield from stream.skip()
        yield from read_json_value(stream)
        yield from stream.skip()
    if not (yield from stream.take("}")):
        return
    stream.mark_emitted()


def json_call_head(name: str, arguments: str = "arguments") -> str:
    """What stands in front of the arguments."""
    return f'{{"name": {json.dumps(name)}, "{arguments}": '
