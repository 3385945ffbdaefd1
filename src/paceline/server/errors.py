"""Errors of requests: the exception, the statuses and texts of everything that can be raised, and limits on sizes."""

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from paceline.errors import CONTEXT_LENGTH_EXCEEDED, CapacityError, ConfigError, PacelineError, RequestError, printable
from paceline.sampling.grammars.compile_sandbox import GRAMMAR_BUSY_CODE
from paceline.server.settings import MAX_HEAD_BYTES, MAX_HEADERS, ServerSettings
from paceline.tokenizer.control_text import strings_in

log = logging.getLogger("paceline.server")

_MAX_PARAMETER = 200
_MAX_VALUE = 40  # characters of a value that an error repeats
_EXPECTED = {
    "string_type": "a string",
    "string_unicode": "a string without half characters",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of 64 bits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""Types of pydantic's errors, and what it would have accepted."""
FIELD_ERROR = "field_error"
"""Type of the errors that `fields.Fields` raises itself: their text begins after the field's name."""


class HttpError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong, the value, the limit and the way out.
        kind: OpenAI's `type`.
        parameter: the field of the request that is wrong, if it is one.
        code: the mistake as an identifier.
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
        """The message with the field's name in it, for APIs that have no other place for the name.

        Agents compare the beginning of the message about a prompt that is too long; it stays as it is.
        """
        name = None if self.code == CONTEXT_LENGTH_EXCEEDED else self.parameter
        return self.message if name is None or name in self.message else f"{name}: {self.message}"


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


def invalid(name: str, problem: str, code: str = "invalid_value") -> HttpError:
    """An error about a field. `problem` follows the name in the text."""
    return HttpError(400, f"{name} {problem}", parameter=name, code=code)


def unsupported(name: str, reason: str) -> HttpError:
    """An error about a field that requests something this server does not do."""
    return HttpError(400, f"{name} is not served: {reason}", parameter=name, code="unsupported_parameter")


def unavailable(text: str, code: str, retry_s: int | None = None) -> HttpError:
    """An error of status 503. `retry_s` is how many seconds a client shall wait before it sends the request again."""
    headers = None if retry_s is None else {"Retry-After": str(retry_s)}
    return HttpError(503, text, kind="service_unavailable_error", code=code, headers=headers)


def http_error_of(error: BaseException) -> HttpError:
    """The answer to an error. Faults of the server itself are reported without details: their text may repeat what a request held."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError) and error.code == GRAMMAR_BUSY_CODE:
        return unavailable(str(error), GRAMMAR_BUSY_CODE, 5)
    if isinstance(error, RequestError):
        status = 404 if error.code == "adapter_not_found" else 400  # removed since the request was read
        return HttpError(status, str(error), parameter=error.parameter, code=error.code or "invalid_value")
    if isinstance(error, CapacityError):
        return HttpError(400, str(error), parameter="max_tokens", code=CONTEXT_LENGTH_EXCEEDED)
    if isinstance(error, HTTPException) and error.status_code == 404:
        return HttpError(404, "there is nothing at this path: /openapi.json lists all paths", code="not_found")
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        text = f"this path takes {allowed}: /openapi.json lists all paths"
        return HttpError(405, text, code="method_not_allowed", headers=error.headers)
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RecursionError):
        return HttpError(400, "the request is nested too deeply: send a flatter one", code="invalid_value")
    if isinstance(error, ConfigError):
        return unavailable("the engine takes no requests any more", "closed")
    # a log line has the place and the type; the text may repeat what a request held
    places = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    log.error("%s at %s", type(error).__name__, " > ".join(places[-6:]))
    if isinstance(error, PacelineError):
        return HttpError(500, "the engine could not go on with this request", kind="server_error", code="engine_error")
    return HttpError(500, "the server failed at this request; its log names the place", kind="server_error", code="internal_error")


def head_too_large() -> HttpError:
    """The answer to a request whose headers and path are longer than the server keeps."""
    text = f"the request has more than {MAX_HEAD_BYTES} bytes of headers and path, or more than {MAX_HEADERS} headers: send fewer"
    return HttpError(431, text, code="head_too_large", headers={"Connection": "close"})


def check_count(name: str, count: int, limit: int) -> None:
    """Raise HttpError if a list is longer than `limit`."""
    if count > limit:
        raise invalid(name, f"has {count} items, and may have {limit}: send fewer")


def check_length(name: str, num_chars: int, settings: ServerSettings) -> None:
    """Raise HttpError if a prompt has too many characters to be tokenised."""
    if num_chars > settings.max_prompt_chars:
        text = f"prompt is too long: {num_chars} characters > {settings.max_prompt_chars} maximum"
        text = f"{text}. It exceeds the available context size of this server: shorten it, or serve with another --max-prompt-chars"
        raise HttpError(400, text, parameter=name, code=CONTEXT_LENGTH_EXCEEDED)


def num_chars(value: object) -> int:
    """Count the characters of all texts in a JSON value, keys included."""
    return sum(map(len, strings_in(value)))


def field_error(errors: Sequence[Any], body: object) -> HttpError:
    """Return the error of the first invalid field of a body: its name, value and allowed values.

    Args:
        errors: pydantic's.
        body: the JSON value that was validated, by which names of fields are distinguished from names of union branches.
    """
    same = _closest(errors, body)
    first = same[0]
    name = field_name(_place(first, body))
    if first["type"] == FIELD_ERROR:
        return HttpError(400, f"{name} {first['msg']}", parameter=name, code=first["ctx"]["code"])
    if first["type"] == "missing":
        what = "one of the names that GET /v1/models lists" if name == "model" else "it"
        return HttpError(400, f"{name} is missing: send {what}", parameter=name, code="missing_required_parameter")
    if first["type"] == "union_tag_invalid":
        name, expected = f"{name}.type", first["ctx"]["expected_tags"].replace("'", "")
        return unsupported(name, f"it is {shown(first['ctx']['tag'])}; send one of {expected}")
    if first["type"] == "union_tag_not_found":
        return HttpError(400, f"{name}.type is missing: send it", parameter=f"{name}.type", code="missing_required_parameter")
    expected = " or ".join(dict.fromkeys(map(_expected, same)))
    return HttpError(400, f"{name or 'the body'} is {shown(first['input'])}: send {expected}", parameter=name, code="invalid_value")


def field_name(place: Sequence[str | int]) -> str | None:
    """The name of a place in a request, such as "messages[0].content"; None = the request itself."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return printable(text.removeprefix("."))[:_MAX_PARAMETER] or None


def shown(value: object) -> str:
    """A JSON value as an error repeats it: a few characters at most."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        text = json.dumps(value[: _MAX_VALUE + 1], ensure_ascii=False)
        return f'{text[:_MAX_VALUE]}…"' if len(text) > _MAX_VALUE + 2 else text
    text = json.dumps(value) if value is None or isinstance(value, bool | int | float) else type(value).__name__
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"


def _closest(errors: Sequence[Any], body: object) -> list[Any]:
    """The errors about one place. Where a field has several forms, that of the form which fits furthest."""
    first = _place(errors[0], body)
    within = [(place, error) for error in errors if (place := _place(error, body))[: len(first)] == first]
    furthest, _ = max(within, key=lambda found: (len(found[0]), [part for part in found[0] if isinstance(part, int)]))
    return [error for place, error in within if place == furthest]


def _expected(error: Any) -> str:
    if error["type"] == "literal_error":
        expected: str = error["ctx"]["expected"]
        return f"one of {expected}".replace("'", '"') if " or " in expected else expected.replace("'", '"')
    return _EXPECTED.get(error["type"], str(error["msg"]))


def _place(error: Any, body: object) -> list[str | int]:
    """The keys and indices that lead to a wrong field.

    pydantic's `loc` also names the forms that were tried; a part that `body` has at its place is a key.
    """
    place = list[str | int]()
    is_of_object = error["type"] in ("missing", FIELD_ERROR)  # their input is the object that holds the field
    current: Any = body
    for part in error["loc"]:
        if is_of_object and current is error["input"]:
            break
        is_key = isinstance(current, Mapping) and part in current
        if is_key or (isinstance(current, list) and isinstance(part, int) and part < len(current)):
            place.append(part)
            current = current[part]
    if is_of_object:
        place.append(error["loc"][-1] if error["type"] == "missing" else error["ctx"]["name"])
    return place
