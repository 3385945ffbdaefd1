"""The exceptions of paceline. Each text says what failed, the value, the limit and the way out.

PacelineError
├── ConfigError                 a setting of ours is wrong or two settings contradict each other
├── CheckpointError             a model directory or file cannot be used (missing, truncated, unknown, NaN)
├── IncompatibleDrafterError    the requested drafter can never work with this target
├── CapacityError               not enough memory (or cache blocks) for what was asked
├── RequestError                one request is wrong (an HTTP 4xx); others are untouched
└── BackendUnavailableError     an optional dependency or device is absent; names what to install
"""

import functools
import inspect
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from reprlib import Repr
from types import CodeType
from typing import Any

MAX_TEXT = 4000
"""Characters of an error's text; what is longer loses its middle."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Code of errors about prompts that are too long."""


class PacelineError(Exception):
    """Base of every error paceline raises on purpose.

    Its text is one line of printable characters, whatever the names and values in it hold: a terminal or a log shows it as it is.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class ConfigError(PacelineError):
    """A setting is unknown, out of range or contradicts another one."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be read or does not hold what its config promises."""


class IncompatibleDrafterError(PacelineError):
    """The requested drafter cannot guess for this target."""


class CapacityError(PacelineError):
    """Memory or cache blocks are exhausted; nothing was changed."""


class RequestError(PacelineError):
    """A request's prompt or parameters cannot be served.

    Args:
        message: what is wrong, the value, the limit and the way out.
        parameter: name of the offending parameter, when there is one.
        code: the kind of mistake in a word that programs compare, such as "context_length_exceeded", when it has one.
    """

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class BackendUnavailableError(PacelineError):
    """A library or device this choice needs is not present."""


@contextmanager
def library_errors(text: str, kind: Callable[[str], PacelineError]) -> Iterator[None]:
    """Whatever a library raises in this block becomes one of our errors.

    Args:
        text: what failed and the way out; the library's own message follows in brackets.
        kind: the error.
    """
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise kind(f"{text} ({described(error)})") from error


def prompt_too_long(num_tokens: int, max_model_len: int, way_out: str, *, why: str = "") -> str:
    """Return the text of an error about a prompt that leaves no room for output.

    Agents shorten a conversation where a text has Anthropic's first sentence or OpenAI's second one, and repeat the request elsewhere.

    Args:
        why: follows the first sentence, such as how `num_tokens` was estimated.
    """
    first = f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum{why}"
    return (
        f"{first}. This model's maximum context length is {max_model_len} tokens, and at least one must be left for the output: {way_out}"
    )


@contextmanager
def memory_errors(what: str, way_out: str = "use quantization='int8' or 'int4', a smaller one, or close programs") -> Iterator[None]:
    """Running out of memory in this block becomes a CapacityError; `what` names what did not fit."""
    try:
        yield
    except MemoryError as error:
        detail = f" ({described(error)})" if str(error) else ""
        raise CapacityError(f"{what} does not fit in memory{detail}: {way_out}") from error


def described(error: BaseException) -> str:
    """A library's error in a few words: the first line of its text, without advice to let a stranger's code run."""
    first = next(iter(str(error).splitlines()), "")[:300]
    if type(error).__name__ == "UnpicklingError" or "weights_only" in first or "trust_remote_code" in first:
        first = "it holds objects or code of its own, which are never let run"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_MAX_LISTED = 20  # names in an error


class _Shortened(Repr):
    """Short `repr` of values from untrusted files: a text of some lines, a few items, no deep nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 200


shortened = _Shortened().repr
"""The `repr` of a value from a file, cut: for errors."""


def name_list(names: Iterable[str], what: str = "tensor") -> str:
    """Return the number of names and the first of them, as in "3 tensors: a, b, c"."""
    names = list(names)
    rest = len(names) - _MAX_LISTED
    count = f"{len(names)} {what}{'s' if len(names) > 1 else ''}"
    return f"{count}: {', '.join(names[:_MAX_LISTED])}{f' and {rest} more' if rest > 0 else ''}"


def printable(text: str) -> str:
    """`text` as one line without control characters, at most MAX_TEXT long.

    Line breaks and tabs become spaces; every other character that Python calls not printable (escape sequences, directions of writing,
    halves of surrogate pairs) is spelled as `repr` spells it.
    """
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT * 2 // 3]} … {text[-(MAX_TEXT // 3 - 3) :]}"  # the way out stands at the end
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char in "\n\r\t" else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is meant for the program, whatever it was doing: a signal's, which arrive in the main thread alone.

    That is Ctrl-C, and an exit that a signal's handler raises. Everything else that is no `Exception` is a fault of what was being done: a
    panic of a Rust library, a request's own code that raises SystemExit, CancelledError or GeneratorExit.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and _is_of_a_signal(error))


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a signal handler is in the exception's traceback."""
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = inspect.unwrap(getattr(handler, "__func__", handler)) if callable(handler) else None
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    return code if isinstance(code, CodeType) else None


def as_exception(error: BaseException) -> Exception:
    """The same fault as an `Exception`, to be raised elsewhere."""
    if isinstance(error, Exception):
        return error
    exception = PacelineError(f"{type(error).__name__}: {error}")
    exception.__cause__ = error
    return exception
