"""From a line of a batch file to the line that answers it: the application of the server, asked in this process."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from paceline.errors import PacelineError
from paceline.server.asgi_client import asked
from paceline.server.batch.lines import BatchLine
from paceline.server.settings import ServerSettings

MAX_QUEUE = 100_000
_A_WEEK_S = 604_800.0


class NotAnsweredError(PacelineError):
    """The engine takes no more requests; what is not answered can be asked again."""


def batch_settings(settings: ServerSettings) -> ServerSettings:
    """The same for an application that nobody reaches from elsewhere: its queue is the batch itself, and no answer is waited for alone."""
    return replace(settings, max_queue=MAX_QUEUE, request_timeout_s=_A_WEEK_S)


async def answer_line(app: ASGIApp, line: BatchLine) -> dict[str, Any]:
    """The output line of a request; a request that is refused is answered too, with the server's error.

    Raises:
        NotAnsweredError: it would be answered by another engine, or at another time.
    """
    async with asked(app, "POST", line.url, line.body) as answer:
        content = json.loads(await answer.body())
        request_id = answer.header(b"x-request-id")
        status = answer.status
    if status in (429, 503):
        raise NotAnsweredError(f"line {line.number} was not answered ({_message(content)}): run the same command again")
    response = {"status_code": status, "request_id": request_id, "body": content}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def _message(content: Mapping[str, Any]) -> str:
    return str(content.get("error", {}).get("message", "no reason was given"))
