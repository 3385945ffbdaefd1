"""Nothing of a request names a file, a host, a program or code: what it holds is text, and stays text."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.http_client import HttpClient

CHAT = "/v1/chat/completions"
MARK = "mark-of-a-strangers-request"
REACHING_OUT = ("open", "os.", "subprocess.", "socket.", "urllib.", "shutil.", "tempfile.", "ctypes.", "import", "compile", "exec")
TEMPLATE = "{{ 7 * 191 }}{% include '" + MARK + "' %}{{ ''.__class__.__mro__ }}{# " + MARK + " #}"


class Watch:
    """Audit events of Python that reach outside the process, while it is enabled."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)  # stays until the process ends

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(REACHING_OUT):
            self.seen.append(f"{event} {arguments!r}"[:2000])


WATCH = Watch()


@pytest.fixture
def watch() -> Iterator[Watch]:
    WATCH.seen.clear()
    WATCH.is_on = True
    yield WATCH
    WATCH.is_on = False


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"/etc/{MARK}"}], "max_tokens": 2, "temperature": 0, **more}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": MARK, "schema": fields}}


REQUESTS: list[dict[str, Any]] = [
    chat(),
    chat(messages=[{"role": "user", "content": TEMPLATE, "name": f"../{MARK}"}]),
    chat(messages=[{"role": "system", "content": f"file:///{MARK}"}, {"role": "user", "content": "{% set x = cycler.__init__ %}"}]),
    chat(model=f"../../{MARK}"),
    chat(model=f"http://{MARK}/model"),
    chat(user=f"/{MARK}", metadata={"path": f"/{MARK}"}, prompt_cache_key=f"/{MARK}"),
    chat(speculation={"drafter": f"../{MARK}"}),
    chat(stop=f"/{MARK}"),
    chat(response_format=schema(**{"$ref": f"file:///{MARK}"})),
    chat(response_format=schema(**{"$ref": f"http://{MARK}/schema.json"})),
    chat(response_format=schema(**{"$schema": f"http://{MARK}/draft", "$id": f"file:///{MARK}", "type": "boolean"})),
    chat(prediction={"type": "content", "content": f"/{MARK}"}),
]


def test_http_request_opens_no_file_host_or_program(client: HttpClient, watch: Watch) -> None:
    for fields in REQUESTS:
        assert client.post(CHAT, fields).status_code in (200, 400, 404)
    for path in (f"/v1/models/../../{MARK}", f"/v1/models/%2e%2e%2f{MARK}", f"/{MARK}", f"/..%5c{MARK}"):
        assert client.get(path).status_code == 404
    assert watch.seen, "the watch sees what Python does for the outside"
    assert [line for line in watch.seen if MARK in line] == []


def test_audit_hook_of_the_containment_test_sees_file_access(watch: Watch) -> None:
    with pytest.raises(FileNotFoundError):
        Path(f"/{MARK}").read_text()
    assert any(MARK in line for line in watch.seen)


@pytest.mark.parametrize("role", ["user", "system"])
def test_template_syntax_in_messages_is_text(client: HttpClient, role: str) -> None:
    messages = [{"role": role, "content": TEMPLATE}, {"role": "user", "content": "Hello"}]
    ids = client.json("/tokenize", {"messages": messages})["tokens"]
    text = client.json("/detokenize", {"tokens": ids})["prompt"]
    assert TEMPLATE in text
    assert "1337" not in text
