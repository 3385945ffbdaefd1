"""The exceptions of paceline. Each text says what failed, the value, the limit and the way out.

PacelineError
├── ConfigError                 a setting of ours is wrong or two settings contradict each other
├── CheckpointError             a model directory or file cannot be used (missing, truncated, unknown, NaN)
├── IncompatibleDrafterError    the requested drafter can never work with this target
├── CapacityError               not enough memory (or cache blocks) for what was asked
├── RequestError                one request is wrong (an HTTP 4xx); others are untouched
└── BackendUnavailableError     an optional dependency or device is absent; names what to install
"""

import threading


class PacelineError(Exception):
    """Base of every error paceline raises on purpose."""


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
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class BackendUnavailableError(PacelineError):
    """A library or device this choice needs is not present."""


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is meant for the program, whatever it was doing: Ctrl-C or an exit, which arrive in the main thread alone.

    Everything else that is no `Exception` is a fault of what was being done: a panic of a Rust library, a request's own code that
    raises SystemExit, CancelledError or GeneratorExit.
    """
    return isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread()


def as_exception(error: BaseException) -> Exception:
    """The same fault as an `Exception`, for somebody else to raise."""
    if isinstance(error, Exception):
        return error
    exception = PacelineError(f"{type(error).__name__}: {error}")
    exception.__cause__ = error
    return exception
