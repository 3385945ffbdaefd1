"""An error text is one printable line, whatever the names in it contain."""

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
def test_errors_never_show_control_characters(kind: type[PacelineError]) -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    hostile = [every[start : start + 256] for start in range(0, 0x3000, 256)] + ["\x1b[2J\x1b]0;title\x07", "\ud800", "\u202e", "\r\nok"]
    for text in hostile:
        shown = str(kind(f"/models/{text}/config.json is missing"))
        assert shown.isprintable()
        shown.encode("utf-8")


def test_error_texts_keep_letters_of_all_scripts() -> None:
    text = "die Straße, 你好, café, ▁the Ġthe — “quoted” 😀 № ½"
    assert str(PacelineError(text)) == text


def test_line_breaks_in_errors_become_spaces_and_controls_are_escaped() -> None:
    assert printable("one\ntwo\tthree\x1b[31m\x07\u202e\udc80") == "one two three\\x1b[31m\\x07\\u202e\\udc80"


def test_long_error_keeps_its_beginning_and_end() -> None:
    shown = str(CheckpointError("config.json: " + "x" * 10_000_000 + "; download it again"))
    assert len(shown) <= 4000
    assert shown.startswith("config.json: x")
    assert shown.endswith("x; download it again")


def test_value_shown_in_an_error_is_shortened() -> None:
    deep: object = 1
    for _ in range(900):
        deep = [deep]
    for value in (deep, {"a": deep}, "y" * 1_000_000, list(range(1_000_000)), {str(key): deep for key in range(1000)}):
        assert len(shortened(value)) < 1000
    assert shortened("LlamaForSequenceClassification") == "'LlamaForSequenceClassification'"


def test_request_error_names_its_parameter_after_pickling() -> None:
    error = RequestError("bad\x1b", parameter="stop")
    assert (str(error), error.parameter) == ("bad\\x1b", "stop")
    assert str(pickle.loads(pickle.dumps(error))) == "bad\\x1b"


@pytest.mark.parametrize(
    "wrap", [lambda handler: handler, functools.partial, lambda handler: Callee(handler), lambda handler: Callee(handler).call]
)
def test_exit_raised_by_a_signal_handler_is_an_interrupt(wrap: Callable[[Callable[..., None]], Any]) -> None:
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
