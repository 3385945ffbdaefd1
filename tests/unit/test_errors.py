"""What an error says is one line that a terminal and a log can show, whatever the names in it hold."""

import functools
import pickle
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline import errors
from paceline.errors import CheckpointError, PacelineError, RequestError, is_interrupt, printable, shortened

TREE = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PacelineError)]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_no_error_shows_a_control_character(kind: type[PacelineError]) -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    hostile = [every[start : start + 256] for start in range(0, 0x3000, 256)] + ["\x1b[2J\x1b]0;title\x07", "\ud800", "\u202e", "\r\nok"]
    for text in hostile:
        shown = str(kind(f"/models/{text}/config.json is missing"))
        assert shown.isprintable()
        shown.encode("utf-8")


def test_the_letters_of_all_scripts_stay_as_they_are() -> None:
    text = "die Straße, 你好, café, ▁the Ġthe — “quoted” 😀 № ½"
    assert str(PacelineError(text)) == text


def test_line_breaks_become_spaces_and_others_are_spelled_out() -> None:
    assert printable("one\ntwo\tthree\x1b[31m\x07\u202e\udc80") == "one two three\\x1b[31m\\x07\\u202e\\udc80"


def test_a_long_text_keeps_its_beginning_and_the_way_out() -> None:
    shown = str(CheckpointError("config.json: " + "x" * 10_000_000 + "; download it again"))
    assert len(shown) <= 4000
    assert shown.startswith("config.json: x")
    assert shown.endswith("x; download it again")


def test_a_value_from_a_file_is_shown_in_part() -> None:
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    for value in (deep, {"a": deep}, "y" * 1_000_000, list(range(1_000_000)), {str(key): deep for key in range(1000)}):
        assert len(shortened(value)) < 1000
    assert shortened("LlamaForSequenceClassification") == "'LlamaForSequenceClassification'"


def test_a_request_error_still_names_its_parameter() -> None:
    error = RequestError("bad\x1b", parameter="stop")
    assert (str(error), error.parameter) == ("bad\\x1b", "stop")
    assert str(pickle.loads(pickle.dumps(error))) == "bad\\x1b"


@pytest.mark.parametrize(
    "wrap", [lambda handler: handler, functools.partial, lambda handler: Callee(handler), lambda handler: Callee(handler).call]
)
def test_an_exit_is_the_programs_where_a_signals_handler_raises_it(wrap: Callable[[Callable[..., None]], Any]) -> None:
    def leave(*_: object) -> None:
        sys.exit(1)

    def caught(call: Callable[[], None]) -> BaseException:
        try:
            call()
        except BaseException as error:
            return error
        raise AssertionError("nothing was raised")

    before = signal.signal(signal.SIGTERM, wrap(leave))
    try:
        assert is_interrupt(caught(lambda: signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)))
        assert not is_interrupt(caught(sys.exit))
        assert is_interrupt(KeyboardInterrupt())
        assert not is_interrupt(ValueError())
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(is_interrupt, KeyboardInterrupt()).result()
    finally:
        signal.signal(signal.SIGTERM, before)


class Callee:
    """An object that can be called, and a method."""

    def __init__(self, handler: Callable[..., None]) -> None:
        self._handler = handler

    def __call__(self, *arguments: object) -> None:
        self._handler(*arguments)

    def call(self, *arguments: object) -> None:
        self._handler(*arguments)
