"""The exceptions of paceline. Each error text contains what is wrong, the value, what is allowed, and what to do.

PacelineError
├── ConfigError                 a setting is invalid, or two settings contradict each other
├── CheckpointError             a model directory or file cannot be used (missing, truncated, unknown format, NaN)
├── IncompatibleDrafterError    the requested drafter cannot work with this target
├── CapacityError               too little memory or too few cache blocks
├── RequestError                one request is invalid (HTTP status 4xx); other requests are not affected
└── BackendUnavailableError     an optional dependency or device is missing
"""

import functools
import inspect
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from reprlib import Repr
from types import CodeType
from typing import Any

MAX_TEXT = 4000
"""Maximum length of an error text in characters. In a longer text the middle is replaced by "…"."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""`RequestError.code` of a prompt that is too long, as in OpenAI's API."""


class PacelineError(Exception):
    """Base class of the exceptions of paceline.

    The text is made one line of printable characters, so that names from untrusted files cannot send control codes to a terminal.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class ConfigError(PacelineError):
    """A setting is unknown, invalid, or contradicts another one."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be read, or its tensors do not match its config.json."""


class IncompatibleDrafterError(PacelineError):
    """The requested drafter cannot draft for this target."""


class CapacityError(PacelineError):
    """There is too little memory, or there are too few cache blocks."""


class RequestError(PacelineError):
    """The prompt or a parameter of a request is invalid.

    Args:
        message: what is wrong, the value, what is allowed, and what to do.
        parameter: name of the invalid parameter, if there is one.
        code: identifier of the kind of error, if it has one, such as "context_length_exceeded".
    """

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class BackendUnavailableError(PacelineError):
    """A library or a device that a setting requires is missing."""


@contextmanager
def convert_library_errors(text: str, error_type: Callable[[str], PacelineError]) -> Iterator[None]:
    """Context manager: raise every exception that a library raises in the block as one of our errors.

    Args:
        text: what failed and what to do; a summary of the library's error is appended.
        error_type: type of our error.
    """
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise error_type(f"{text} ({summarize_error(error)})") from error


def prompt_too_long_text(num_tokens: int, max_model_len: int, advice: str, *, explanation: str = "") -> str:
    """Return the error text for a prompt that leaves no room for output.

    It contains the sentences of Anthropic ("prompt is too long") and OpenAI ("maximum context length"), because agents search errors for
    them to find out that they must shorten the conversation.

    Args:
        advice: what the user can do, which is appended.
        explanation: text after the numbers, such as how `num_tokens` was estimated.
    """
    first = f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum{explanation}"
    return f"{first}. This model's maximum context length is {max_model_len} tokens, and at least one must be left for the output: {advice}"


@contextmanager
def convert_memory_errors(what: str, advice: str = "use quantization='int8' or 'int4', a smaller one, or close programs") -> Iterator[None]:
    """Context manager: raise a MemoryError in the block as a CapacityError. `what` names what did not fit."""
    try:
        yield
    except MemoryError as error:
        detail = f" ({summarize_error(error)})" if str(error) else ""
        raise CapacityError(f"{what} does not fit in memory{detail}: {advice}") from error


def summarize_error(error: BaseException) -> str:
    """Return the type and the first line of a library's error. Advice to allow code in a checkpoint to run is replaced."""
    first = next(iter(str(error).splitlines()), "")[:300]
    if type(error).__name__ == "UnpicklingError" or "weights_only" in first or "trust_remote_code" in first:
        first = "it holds objects or code of its own, which are never let run"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_MAX_LISTED = 20  # maximum names in an error text


_short_repr = Repr()
_short_repr.maxstring = _short_repr.maxother = _short_repr.maxlong = 200
shortened = _short_repr.repr
"""Returns the `repr` of a value from an untrusted file for an error text: 200 characters per string, a few items and levels of nesting."""


def name_list(names: Iterable[str], what: str = "tensor") -> str:
    """Return how many names there are, and the first ones, as in "3 tensors: a, b, c"."""
    names = list(names)
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''}: {first_names(names)}"


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are, as in "a, b, c and 4 more"."""
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def printable(text: str) -> str:
    """Return a text as one line of at most MAX_TEXT printable characters.

    Line breaks and tabs become spaces. Other characters that are not printable, such as escape sequences, marks of writing direction or
    halves of surrogate pairs, are written as in `repr`.
    """
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT * 2 // 3]} … {text[-(MAX_TEXT // 3 - 3) :]}"  # the end says what to do
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else " " if one in "\n\r\t" else one.encode("unicode_escape").decode("ascii") for one in text)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: bytes that are not UTF-8, and some JSON escapes, become halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception was raised by a signal and so must end the program: Ctrl-C, or a SystemExit of a signal handler.

    Other exceptions that are no `Exception` are errors of the code that ran, such as a panic in a Rust library or a SystemExit in a logits
    processor. Signals are handled in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and _is_from_signal_handler(error))


def _is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler is in the traceback of an exception."""
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = inspect.unwrap(getattr(handler, "__func__", handler)) if callable(handler) else None
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


def as_exception(error: BaseException) -> Exception:
    """Return the error itself if it is an `Exception`, else a `PacelineError` with its type and text."""
    if isinstance(error, Exception):
        return error
    exception = PacelineError(f"{type(error).__name__}: {error}")
    exception.__cause__ = error
    return exception
