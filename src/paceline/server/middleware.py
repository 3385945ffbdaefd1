"""ASGI middleware: authentication, Host check, size limits, content type, request ids, security headers and the log."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.admission import AdmissionControl
from paceline.server.apis import api_of
from paceline.server.asgi_client import REQUEST_ID
from paceline.server.errors import ClientGoneError, HttpError, head_too_large, http_error_of
from paceline.server.fields import IGNORED_HEADER
from paceline.server.page.routes import PAGE_PATHS
from paceline.server.settings import LOOPBACK_NAMES, MAX_HEAD_BYTES, MAX_HEADERS, ServerSettings

log = logging.getLogger("paceline.server")

CountResponse = Callable[[str | None, int | None, str | None], None]
WITHOUT_KEY = ("/health", "/ready", *PAGE_PATHS)
BODY_TOO_LARGE = "paceline.body_too_large"
"""Key of a scope whose body is known to be too large before it has arrived."""
MODEL_NAME = "paceline.model"
"""Key of a scope for the name of the model that its request is for, once that is known."""
AT_END = "paceline.at_end"
"""Key of a scope for an `ExitStack` that is closed when its request has ended, however it ends."""
LINGER_S, LINGER_BYTES = 2.0, 64_000_000
"""How much of a refused body is read, so that a client that is still sending gets the status and not a reset."""
_METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_BROWSER_HEADERS = ("origin", "sec-fetch-site")  # every browser sends one of them with a POST
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{0,5})?")
_ADDRESS = re.compile(rb"https?://(?P<host>[^/]*)(?P<path>/.*)?", re.IGNORECASE | re.DOTALL)
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def add_middleware(
    app: Starlette, settings: ServerSettings, admission: AdmissionControl, count_response: CountResponse = lambda *_: None
) -> None:
    """Add `ServerMiddleware`, and CORS for the origins that the settings allow."""
    app.add_middleware(ServerMiddleware, settings=settings, admission=admission, count_response=count_response)
    if settings.allow_origin:  # added last, so it runs first: preflights carry no key, and error responses need CORS headers too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origin,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,  # browsers ask where a public page reaches this machine
            expose_headers=("X-Request-Id", "Retry-After", IGNORED_HEADER),
        )


class ServerMiddleware:
    """Checks each request, logs one line for it, and turns whatever is raised into an answer in its API.

    Args:
        admission: may abort requests while the server shuts down.
        count_response: called with the route, the status and the model of each response.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, admission: AdmissionControl, count_response: CountResponse) -> None:
        self._app, self._settings, self._admission, self._count_response = app, settings, admission, count_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = _Exchange(self._app, self._settings, scope, send)
            await exchange.respond(receive, self._admission)
            self._count_response(exchange.route, exchange.status, exchange.model)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # web sockets are not served
            await send({"type": "websocket.close", "code": 1003})


def _has_key(headers: Headers, keys: Iterable[str]) -> bool:
    """Return whether headers hold one of the keys, as OpenAI's or Anthropic's clients send it, in a time that does not depend on it."""
    given = headers.get("x-api-key", "")
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        given = token.strip()
    sent = _hash(given.encode("utf-8", "surrogateescape"))
    return sum(hmac.compare_digest(sent, _hash(key.encode())) for key in keys) > 0  # compares all of them


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class _Exchange:
    """One request and its response.

    Attributes:
        status: of the response; 499 = the client disconnected first.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, scope: Scope, send: Send) -> None:
        self._app, self._settings = app, settings
        self._method = scope["method"]
        # HEAD is answered by the routes of GET
        self._scope, self._send = {**scope, "method": "GET"} if self._method == "HEAD" else scope, send
        self._id = scope.get(REQUEST_ID) or f"req-{secrets.token_hex(8)}"
        self._scope[REQUEST_ID] = self._id
        self.status: int | None = None
        self._is_open_stream = False
        self._target_host = _split_target(self._scope)
        headers = Headers(scope=scope)
        self._has_unread_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self._started_s = time.perf_counter()

    async def respond(self, receive: Receive, admission: AdmissionControl) -> None:
        """Answer the request; raises nothing."""
        try:
            self._check()
            if self._method in ("POST", "PUT", "PATCH"):
                receive = await self._read_body(receive)
            with ExitStack() as self._scope[AT_END]:
                await admission.run_request(self._app(self._scope, receive, self._send_on))
        except (ClientGoneError, asyncio.CancelledError):  # the client disconnected, or uvicorn ended its wait for it
            self.status = self.status or 499
        except Exception as error:
            with suppress(asyncio.CancelledError):
                await self._send_error(http_error_of(error), receive)
        finally:
            self._log()

    def _check(self) -> None:
        """Check sizes, host, key and content type, in this order.

        Raises:
            HttpError: the request is refused.
        """
        headers = Headers(scope=self._scope)
        num_bytes = len(self._scope.get("raw_path") or b"") + len(self._scope["query_string"])
        num_bytes += sum(len(name) + len(value) for name, value in headers.raw)
        if num_bytes > MAX_HEAD_BYTES or len(headers.raw) > MAX_HEADERS:
            raise head_too_large()
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have used the other one
            raise HttpError(400, "the request has both Content-Length and Transfer-Encoding: send one of them", code="two_lengths")
        hosts = [headers.get("host", "")] if self._target_host is None else [headers.get("host", ""), self._target_host]
        if self._settings.is_loopback and not all(map(self._is_allowed_host, hosts)):
            text = (
                "Host header not allowed: this server accepts only localhost. "
                f"Use http://127.0.0.1:{self._settings.port or 'PORT'} or --allowed-hosts."
            )
            raise HttpError(403, text, code="host_not_allowed")
        if (keys := self._settings.api_keys) and self._scope["path"] not in WITHOUT_KEY and not _has_key(headers, keys):
            raise HttpError(
                401,
                "the API key is missing or not valid: send it as Authorization: Bearer KEY, or as x-api-key: KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._method == "POST" and not self._is_json(headers):
            text = "the body must be JSON: send it with Content-Type: application/json (curl: -H 'Content-Type: application/json')"
            raise HttpError(415, text, code="unsupported_media_type")
        if any(value.strip().lower() not in ("", "identity") for value in headers.getlist("content-encoding")):
            text = "Content-Encoding is not supported: send the JSON without compression and without that header"
            raise HttpError(415, text, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})

    def _is_json(self, headers: Headers) -> bool:
        """Return whether the content type is JSON. APIs whose clients omit it accept any that no browser sends."""
        if headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
            return True
        if api_of(self._scope["path"]).names_type or any(name in headers for name in _BROWSER_HEADERS):
            return False
        MutableHeaders(scope=self._scope)["content-type"] = "application/json"
        return True

    def _is_allowed_host(self, host: str) -> bool:
        """Return whether a Host header names this machine: one that does not may be DNS rebinding."""
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found["address"] or found["name"]
        return name in (*LOOPBACK_NAMES, self._settings.host.lower(), *map(str.lower, self._settings.allowed_hosts))

    async def _read_body(self, receive: Receive) -> Receive:
        """Read the whole body; return a channel that yields it once.

        Raises:
            HttpError: it is too long, or takes too long.
            ClientGoneError: the client disconnected.
        """
        limit = self._settings.max_body_bytes
        too_long = HttpError(413, f"the body is longer than {limit} bytes: send less, or raise --max-body-mb", code="body_too_large")
        if int(length) > limit if (length := Headers(scope=self._scope).get("content-length", "")).isdecimal() else False:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    body += message.get("body", b"")
                    if len(body) > limit or BODY_TOO_LARGE in self._scope:
                        raise too_long
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the body did not arrive within {self._settings.body_timeout_s:g} s: send it faster"
            raise HttpError(408, text, kind="timeout_error", code="body_timeout") from None
        self._has_unread_body = False
        messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_read() -> Message:
            return messages.pop() if messages else await receive()

        return receive_read

    async def _send_error(self, error: HttpError, receive: Receive) -> None:
        """Answer with an error, or end a stream that has begun with one."""
        api = api_of(self._scope["path"])
        if self._is_open_stream:
            await self._send_on({"type": "http.response.body", "body": api.error_event(error)})
        elif self.status is None:
            response = api.response(error)
            must_linger = self._has_unread_body
            await self._send_on({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
            await self._send_on({"type": "http.response.body", "body": response.body, "more_body": must_linger})
            if must_linger:
                await _discard_body(receive)
                await self._send_on({"type": "http.response.body"})

    async def _send_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _SECURITY_HEADERS.items():
                headers.setdefault(name, value)  # the page has a policy of its own
            headers["X-Request-Id"] = self._id
            if self._has_unread_body:
                headers["Connection"] = "close"
            self._is_open_stream = headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))
        else:
            self._is_open_stream = self._is_open_stream and message.get("more_body", False)
            if self._method == "HEAD":
                message = {**message, "body": b""}
        await self._send(message)

    @property
    def route(self) -> str | None:
        """The pattern of the route that matched the path, if the request came that far."""
        return getattr(self._scope.get("route"), "path", None)

    @property
    def model(self) -> str | None:
        """The name of the model that the request is for, if it came that far."""
        return self._scope.get(MODEL_NAME)

    def _log(self) -> None:
        """Log one line of JSON. Nothing in it comes from the client: no path, no header, no text."""
        fields: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._id,
            "method": self._method if self._method in _METHODS else "other",
            "route": self.route,
            "status": self.status,
            "seconds": round(time.perf_counter() - self._started_s, 4),
        }
        log.info("%s", json.dumps(fields))


def _split_target(scope: Scope) -> str | None:
    """Reduce a target in absolute form to its path; return its host. None = it was a path."""
    found = _ADDRESS.fullmatch(scope.get("raw_path") or b"")
    if found is None:
        return None
    path = found["path"] or b"/"
    scope["raw_path"], scope["path"] = path, unquote(path.decode("latin-1"))
    return found["host"].decode("latin-1")


async def _discard_body(receive: Receive) -> None:
    """Read what the client still sends, up to `LINGER_BYTES` and for `LINGER_S`."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
