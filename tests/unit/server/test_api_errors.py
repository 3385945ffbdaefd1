"""How each API writes an error that ends a stream."""

import json

import pytest

from paceline.server.apis import api_of
from paceline.server.errors import HttpError

ERROR = HttpError(503, "the server is shutting down", kind="service_unavailable_error", code="shutting_down")


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/v1/chat/completions", None, None),
        ("/v1/responses", "error", "error"),
        ("/responses", "error", "error"),
        ("/v1/messages", "error", "error"),
    ],
)
def test_error_event_has_the_name_that_api_clients_expect(path: str, name: str | None, kind: str | None) -> None:
    *names, data = api_of(path).error_event(ERROR).decode().strip().splitlines()
    assert names == ([] if name is None else [f"event: {name}"])
    fields = json.loads(data.removeprefix("data: "))
    assert fields.get("type") == kind
    assert "shutting down" in json.dumps(fields)
