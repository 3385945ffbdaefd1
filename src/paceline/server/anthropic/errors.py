"""Errors as Anthropic's API tells them."""

from typing import Any

from paceline.server.http_errors import HttpError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: HttpError) -> dict[str, Any]:
    """The JSON object of an error; the field that is wrong is named in its text."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.text}}
