"""A call as one JSON object with the tool's name and its arguments."""

import json

from paceline.parsing.event_sink import Writer
from paceline.parsing.lenient_json import json_object, short_string, skipped_value
from paceline.parsing.text_stream import MalformedError, Reading, Source

_ARGUMENTS = ("arguments", "parameters")


def read_envelope(source: Source, writer: Writer, *, only_known: bool = False) -> Reading[None]:
    """Pass {"name": …, "arguments": {…}} and tell the call; "parameters" is another name of the arguments.

    Behind the arguments a missing brace is forgiven. Without arguments there is a call with none.

    Args:
        only_known: whether it must have arguments and name a tool that the model was told of; else it may be any JSON.

    Raises:
        MalformedError: it is no call.
    """
    yield from source.skip()
    yield from source.expect("{")
    name = held = None
    while True:
        yield from source.skip()
        key = yield from short_string(source)
        yield from source.skip()
        yield from source.expect(":")
        yield from source.skip()
        if key == "name":
            name = yield from short_string(source)
            if not name or (only_known and name not in writer.tool_names):
                raise MalformedError
        elif key in _ARGUMENTS and name is not None:
            yield from _tell_arguments(source, writer, name)
            yield from _pass_rest(source)
            return
        elif key in _ARGUMENTS:
            held = _object_text((yield from skipped_value(source)))
        else:
            yield from skipped_value(source)
        yield from source.skip()
        if (yield from source.take("}")):
            break
        yield from source.expect(",")
    if name is None or (held is None and only_known):
        raise MalformedError
    with writer.call(name):
        writer.arguments("{}" if held is None else held)
    source.settle()


def _tell_arguments(source: Source, writer: Writer, name: str) -> Reading[None]:
    char = yield from source.peek()
    if char == "{":
        source.settle()
        with writer.call(name):
            yield from json_object(source, writer.arguments)
        return
    text = _object_text((yield from skipped_value(source)))
    source.settle()
    with writer.call(name):
        writer.arguments(text)


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


def _pass_rest(source: Source) -> Reading[None]:
    """What follows the arguments up to the brace, if it is as it should be; else nothing is passed."""
    yield from source.skip()
    while (yield from source.take(",")):
        yield from source.skip()
        yield from short_string(source)
        yield from source.skip()
        yield from source.expect(":")
        yield from source.skip()
        yield from skipped_value(source)
        yield from source.skip()
    if not (yield from source.take("}")):
        return
    source.settle()


def envelope_head(name: str, arguments: str = "arguments") -> str:
    """What stands in front of the arguments."""
    return f'{{"name": {json.dumps(name)}, "{arguments}": '
