"""Errors as Ollama's API tells them."""

from typing import Any

from paceline.server.http_errors import HttpError


def ollama_error(error: HttpError) -> dict[str, Any]:
    """The JSON object of an error; the field that is wrong is named in its text."""
    return {"error": error.text}
