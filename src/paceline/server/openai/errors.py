"""Errors as OpenAI's APIs tell them."""

from typing import Any

from paceline.server.http_errors import HttpError


def openai_error(error: HttpError) -> dict[str, Any]:
    """The JSON object of an error."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.parameter, "code": error.code}}
