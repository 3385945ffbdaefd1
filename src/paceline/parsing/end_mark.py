"""Passes opening and end marks of calls, which models may omit, repeat or misspell."""

import re

from paceline.parsing.text_stream import Parse, TextStream

_TAG_CHARACTER = re.compile(r"[\w:.｜-]")


def pass_end_mark(stream: TextStream, close: str) -> Parse[None]:
    """Pass white space, `close` and other closing tags such as </tool>, any number of times."""
    while True:
        yield from stream.skip()
        stream.mark_emitted()
        if (yield from stream.peek()) == "":
            return
        if (yield from stream.take_or_end(close)):
            continue
        if not (yield from stream.take_or_end("</")):
            return
        yield from stream.matching(_TAG_CHARACTER)
        yield from stream.skip(" ")
        yield from stream.take(">")


def skip_repeated_mark(stream: TextStream, mark: str) -> Parse[None]:
    """Pass white space and an opening mark that is repeated."""
    yield from stream.skip()
    while (yield from stream.take(mark)):
        yield from stream.skip()
