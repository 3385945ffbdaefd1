"""The dialects that are spoken, by the paths that speak them: how each says that something went wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.anthropic.errors import anthropic_error
from paceline.server.framing import data_event, line, named_event
from paceline.server.http_errors import HttpError, http_error_of
from paceline.server.ollama.errors import ollama_error
from paceline.server.openai.errors import openai_error


@dataclass(frozen=True, slots=True)
class Dialect:
    """How errors are told, and what a stream is made of.

    Attributes:
        error: the JSON object of an error.
        event: the bytes of an object in a stream.
        media_type: of a stream.
        names_type: whether its clients say that a body is JSON; Ollama reads any, and programs built for it leave that out.
    """

    error: Callable[[HttpError], dict[str, Any]]
    event: Callable[[Mapping[str, Any]], bytes] = data_event
    media_type: str = "text/event-stream"
    names_type: bool = True

    def response(self, error: HttpError) -> JSONResponse:
        """The answer that is an error."""
        return JSONResponse(self.error(error), error.status, error.headers)

    def error_event(self, error: HttpError) -> bytes:
        """What ends a stream that failed."""
        return self.event(self.error(error))


OPENAI = Dialect(openai_error)
BY_PATH = {
    "/v1/messages": Dialect(anthropic_error, named_event),
    "/api": Dialect(ollama_error, line, "application/x-ndjson", names_type=False),
}


def tell_errors(app: FastAPI) -> None:
    """Have an application answer its errors in the dialect of the path."""

    async def answer(request: Request, error: Exception) -> Response:
        return dialect_of(request.url.path).response(http_error_of(error))

    for kind in (RequestValidationError, HTTPException, HttpError):
        app.add_exception_handler(kind, answer)


def dialect_of(path: str) -> Dialect:
    """The dialect of a path; OpenAI's where it is nobody's."""
    return next((dialect for start, dialect in BY_PATH.items() if path == start or path.startswith(f"{start}/")), OPENAI)
