"""What every request passes before the routes: who asks, from where, how much, and in which form. Written as plain ASGI."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.client_watch import within
from paceline.server.dialects import dialect_of
from paceline.server.http_errors import ClientGoneError, HttpError, http_error_of
from paceline.server.in_process import REQUEST_ID
from paceline.server.limits import head_too_large
from paceline.server.page.routes import PAGE_PATHS
from paceline.server.settings import LOOPBACK_NAMES, MAX_HEAD_BYTES, MAX_HEADERS, ServerSettings

log = logging.getLogger("paceline.server")

CountAnswer = Callable[[str | None, int | None], None]
WITHOUT_KEY = ("/health", "/ready", *PAGE_PATHS)
_METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_OF_BROWSERS = ("origin", "sec-fetch-site")  # every browser sends one of them with a POST
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{0,5})?")
_ADDRESS = re.compile(rb"https?://(?P<host>[^/]*)(?P<path>/.*)?", re.IGNORECASE | re.DOTALL)
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Door:
    """Middleware: checks, a request id and headers on every answer, one log line for each, and an answer to whatever is raised."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, count_answer: CountAnswer = lambda *_: None) -> None:
        self._app, self._settings, self._count_answer = app, settings, count_answer
        self._keys = Keys(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            visit = _Visit(self._app, self._settings, self._keys, scope, send)
            await visit.answer(receive)
            self._count_answer(visit.route, visit.status)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # there are no web sockets here
            await send({"type": "websocket.close", "code": 1003})


class Keys:
    """The keys that are accepted, by their hashes: comparing takes the same time for every guess."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def accept(self, headers: Headers) -> bool:
        """Whether one of them was sent, as OpenAI's clients or as Anthropic's send them."""
        given = headers.get("x-api-key", "")
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            given = token.strip()
        sent = _hash(given.encode("utf-8", "surrogateescape"))
        return sum(hmac.compare_digest(sent, known) for known in self._hashes) > 0  # all of them are compared


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class _Visit:
    """One request on its way through the door.

    Attributes:
        status: of the answer; 499 = the client went away before.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: Keys, scope: Scope, send: Send) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._scope, self._send = scope, send
        self._id = scope.get(REQUEST_ID) or f"req-{secrets.token_hex(8)}"
        scope[REQUEST_ID] = self._id
        self.status: int | None = None
        self._target_host = _taken_host(scope)
        headers = Headers(scope=scope)
        self._is_body_due = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self._started_s = time.perf_counter()

    async def answer(self, receive: Receive) -> None:
        try:
            self._check()
            if self._scope["method"] in ("POST", "PUT", "PATCH"):
                receive = await self._read_body(receive)
            await self._app(self._scope, receive, self._send_on)
        except (ClientGoneError, asyncio.CancelledError):  # the client has gone, or the server has waited for it long enough
            self.status = self.status or 499
        except Exception as error:
            refusal = http_error_of(error)
            if self.status is None:
                await dialect_of(self._scope["path"]).response(refusal)(self._scope, receive, self._send_on)
        finally:
            self._log()

    def _check(self) -> None:
        """Sizes, host, key and form, in this order.

        Raises:
            HttpError: the request is not let in.
        """
        headers = Headers(scope=self._scope)
        num_bytes = len(self._scope.get("raw_path") or b"") + len(self._scope["query_string"])
        num_bytes += sum(len(name) + len(value) for name, value in headers.raw)
        if num_bytes > MAX_HEAD_BYTES or len(headers.raw) > MAX_HEADERS:
            raise head_too_large()
        if "content-length" in headers and "transfer-encoding" in headers:  # who is in front of us may believe the other one
            raise HttpError(400, "Content-Length and Transfer-Encoding say two lengths: send one of them", code="two_lengths")
        hosts = [headers.get("host", "")] if self._target_host is None else [headers.get("host", ""), self._target_host]
        if self._settings.is_loopback and not all(map(self._is_known_host, hosts)):
            raise HttpError(
                403, "this server listens for this machine alone, and the Host header names another: ask 127.0.0.1", code="wrong_host"
            )
        if self._keys and self._scope["path"] not in WITHOUT_KEY and not self._keys.accept(headers):
            raise HttpError(
                401,
                "no known API key came with the request: send the header Authorization: Bearer KEY, or x-api-key: KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._scope["method"] == "POST" and not self._is_json(headers):
            raise HttpError(415, "the body must be JSON: send it with Content-Type: application/json", code="unsupported_media_type")
        if any(value.strip().lower() not in ("", "identity") for value in headers.getlist("content-encoding")):
            text = "the body is encoded, as its Content-Encoding says: send JSON as it is, without that header"
            raise HttpError(415, text, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})

    def _is_json(self, headers: Headers) -> bool:
        """Whether a body is said to be JSON, or cannot come from a page elsewhere and is read as JSON in its dialect."""
        if headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
            return True
        if dialect_of(self._scope["path"]).names_type or any(name in headers for name in _OF_BROWSERS):
            return False
        MutableHeaders(scope=self._scope)["content-type"] = "application/json"
        return True

    def _is_known_host(self, host: str) -> bool:
        """Whether a Host header names this machine; a page elsewhere whose name was made to mean it does not."""
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found["address"] or found["name"]
        return name in (*LOOPBACK_NAMES, self._settings.host.lower(), *map(str.lower, self._settings.allowed_hosts))

    async def _read_body(self, receive: Receive) -> Receive:
        """The same messages, once the whole body is here.

        Raises:
            HttpError: it is too long, or does not come.
            ClientGoneError: the client went away before.
        """
        limit = self._settings.max_body_bytes
        too_long = HttpError(413, f"the body has more than {limit} bytes: send less", code="body_too_large")
        if int(length) > limit if (length := Headers(scope=self._scope).get("content-length", "")).isdecimal() else False:
            raise too_long
        body = bytearray()
        try:
            async for part in _timed(receive, self._settings.body_timeout_s):
                body += part
                if len(body) > limit:
                    raise too_long
        except TimeoutError:
            text = f"the body did not come within {self._settings.body_timeout_s:g} s: send it faster"
            raise HttpError(408, text, kind="timeout_error", code="body_timeout") from None
        self._is_body_due = False
        is_given = False

        async def again() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return again

    async def _send_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _SECURITY_HEADERS.items():
                headers.setdefault(name, value)  # the page has a policy of its own
            headers["X-Request-Id"] = self._id
            if self._is_body_due:  # nobody will read what still comes
                headers["Connection"] = "close"
        await self._send(message)

    @property
    def route(self) -> str | None:
        """The pattern that its path fits, once it was let in."""
        return getattr(self._scope.get("route"), "path", None)

    def _log(self) -> None:
        """One line of JSON. Nothing in it was chosen by the client: no path, no header, no text."""
        method = self._scope["method"]
        fields: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._id,
            "method": method if method in _METHODS else "other",
            "route": self.route,
            "status": self.status,
            "seconds": round(time.perf_counter() - self._started_s, 4),
        }
        log.info("%s", json.dumps(fields))


def _taken_host(scope: Scope) -> str | None:
    """The host of a target that is a whole address, as proxies are asked; the scope keeps what stands behind it. None = it is a path."""
    found = _ADDRESS.fullmatch(scope.get("raw_path") or b"")
    if found is None:
        return None
    path = found["path"] or b"/"
    scope["raw_path"], scope["path"] = path, unquote(path.decode("latin-1"))
    return found["host"].decode("latin-1")


async def _timed(receive: Receive, timeout_s: float) -> Any:
    """The parts of a body.

    Raises:
        ClientGoneError: the client went away.
        TimeoutError: the whole of it takes longer.
    """
    deadline_s = time.perf_counter() + timeout_s
    while True:
        message = await within(max(0.0, deadline_s - time.perf_counter()), receive())
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
