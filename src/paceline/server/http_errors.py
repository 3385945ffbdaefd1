"""What is wrong with a request, whatever dialect it came in."""

import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from paceline.errors import CapacityError, ConfigError, PacelineError, RequestError, printable
from paceline.sampling.grammar_trial import BUSY
from paceline.server.wrong_fields import wrong_field

log = logging.getLogger("paceline.server")


class HttpError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong, the value, the limit and the way out.
        kind: OpenAI's `type`.
        parameter: the field of the request that is wrong, if it is one.
        code: the mistake in a word.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.parameter, self.code = status, kind, parameter, code
        self.message = printable(message)
        self.headers = dict(headers or {})

    @property
    def text(self) -> str:
        """The message, in which the wrong field is named, for dialects that have no other place for it."""
        name = self.parameter
        return self.message if name is None or name in self.message else f"{name}: {self.message}"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def http_error_of(error: BaseException) -> HttpError:
    """What a client is told about an error; of one that is not the request's own, nothing but that there was one."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestValidationError):
        return invalid_field(error.errors())
    if isinstance(error, RequestError) and error.code == BUSY:
        return HttpError(503, str(error), kind="service_unavailable_error", code=BUSY, headers={"Retry-After": "5"})
    if isinstance(error, RequestError):
        status = 404 if error.code == "adapter_not_found" else 400  # removed since the request was read
        return HttpError(status, str(error), parameter=error.parameter, code=error.code or "invalid_value")
    if isinstance(error, CapacityError):
        return HttpError(400, str(error), parameter="max_tokens", code="context_length_exceeded")
    if isinstance(error, HTTPException) and error.status_code == 404:
        return HttpError(404, "there is nothing at this path: docs/server.md lists what there is", code="not_found")
    if isinstance(error, HTTPException) and error.status_code == 400:  # the one that FastAPI raises
        text = "the body cannot be read: send JSON in UTF-8, nested no deeper than a request needs, with numbers of 4,300 digits at most"
        return HttpError(400, text, code="invalid_value")
    if isinstance(error, HTTPException) and error.status_code == 405:
        taken = (error.headers or {}).get("Allow", "another method")
        return HttpError(
            405, f"this path takes {taken}: docs/server.md lists what there is", code="method_not_allowed", headers=error.headers
        )
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RecursionError):
        return HttpError(400, "the request is nested too deeply: send a flatter one", code="invalid_value")
    if isinstance(error, ConfigError):
        return HttpError(503, "the engine takes no requests any more", kind="service_unavailable_error", code="closed")
    log_fault(error)
    if isinstance(error, PacelineError):
        return HttpError(500, "the engine could not go on with this request", kind="server_error", code="engine_error")
    return HttpError(500, "the server failed at this request; its log says where", kind="server_error", code="internal_error")


def log_fault(error: BaseException) -> None:
    """Where an error was raised, and its type: its text may repeat what a request held."""
    places = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    log.error("%s at %s", type(error).__name__, " > ".join(places[-6:]))


def invalid_field(errors: Sequence[Any], within: str = "") -> HttpError:
    """What `wrong_field` says of pydantic's errors, as an answer."""
    found = wrong_field(errors, within)
    return HttpError(400, found.text, parameter=found.name, code=found.code)
