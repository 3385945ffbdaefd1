"""The APIs, by path: how each writes an error, and what its streams are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.errors import HttpError, http_error_of
from paceline.server.framing import data_event, line, named_event

_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def openai_error(error: HttpError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.parameter, "code": error.code}}


def anthropic_error(error: HttpError) -> dict[str, Any]:
    """Anthropic's object of an error. Its text names the field."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.text}}


def responses_event(error: Mapping[str, Any]) -> bytes:
    """The event that ends a failed stream of responses, whose clients tell events by their `type`."""
    details = error["error"]
    return named_event({"type": "error", "code": details["code"], "message": details["message"], "param": details["param"]})


def ollama_error(error: HttpError) -> dict[str, Any]:
    """Ollama's object of an error. Its text names the field."""
    return {"error": error.text}


@dataclass(frozen=True, slots=True)
class Api:
    """Errors and streams of one API.

    Attributes:
        error: the JSON object of an error.
        event: the bytes of an object in a stream.
        media_type: of a stream.
        names_type: whether its clients declare a body as JSON; Ollama reads any body, and its clients may declare nothing.
    """

    error: Callable[[HttpError], dict[str, Any]]
    event: Callable[[Mapping[str, Any]], bytes] = data_event
    media_type: str = "text/event-stream"
    names_type: bool = True

    def response(self, error: HttpError) -> JSONResponse:
        return JSONResponse(self.error(error), error.status, error.headers)

    def error_event(self, error: HttpError) -> bytes:
        """The last event of a stream that failed."""
        return self.event(self.error(error))


OPENAI = Api(openai_error)
ANTHROPIC = Api(anthropic_error, named_event)
OLLAMA = Api(ollama_error, line, "application/x-ndjson", names_type=False)
RESPONSES = Api(openai_error, responses_event)
BY_PATH = {"/v1/responses": RESPONSES, "/responses": RESPONSES, "/v1/messages": ANTHROPIC, "/messages": ANTHROPIC, "/api": OLLAMA}


def handle_errors(app: FastAPI) -> None:
    """Have an application answer errors in the API of the path."""

    async def answer(request: Request, error: Exception) -> Response:
        return api_of(request.url.path).response(http_error_of(error))

    for kind in (HTTPException, HttpError):
        app.add_exception_handler(kind, answer)


def api_of(path: str) -> Api:
    """The API of a path; OpenAI's where it belongs to none."""
    return next((api for start, api in BY_PATH.items() if path == start or path.startswith(f"{start}/")), OPENAI)
