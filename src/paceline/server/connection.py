"""A client's connection: uvicorn's HTTP/1.1 protocol with the timeouts and limits that uvicorn has no option for.

uvicorn waits without limit for the head of a request and for a client that does not read, and answers bad HTTP in plain text.
"""

import asyncio
import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from paceline.server.apis import api_of
from paceline.server.errors import HttpError, head_too_large
from paceline.server.framing import as_json
from paceline.server.middleware import BODY_TOO_LARGE
from paceline.server.settings import ServerSettings

_BUSY_BODY = b'{"error":{"message":"too many connections are open: retry later","type":"rate_limit_error","param":null,"code":"busy"}}'
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
_BUSY += b"Content-Length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
_LINE = re.compile(rb"[A-Z]+ (?:https?://[^/ ]*)?(/[^ ?]*)")
_MAX_LINE_BYTES = 1024  # of a request's first line, read for its path
_MIN_IDLE_S = 0.25  # a connection that has just been opened or answered may have a request under way
_READ_BYTES = 8192  # at a time: asyncio's 256 kB of tiny chunks block the event loop for 0.3 s


def connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """Return the protocol that uvicorn uses for every connection (`Config.http`)."""
    return type("LimitedConnection", (Connection,), {"settings": settings, "idle": {}})


class Connection(H11Protocol):
    """A connection that is closed when it exceeds its limits.

    Attributes:
        settings: its limits are `max_connections`, `head_timeout_s` and `send_timeout_s`.
        idle: connections of the server that wait for a head, the oldest first, with the time since when.
    """

    settings: ClassVar[ServerSettings]
    idle: ClassVar[dict["Connection", float]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        self._line = b""  # the beginning of an incomplete head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = _READ_BYTES
        if len(self.connections) > self.settings.max_connections:
            oldest = next(iter(self.idle), None)
            if oldest is None or self.loop.time() < self.idle[oldest] + _MIN_IDLE_S:
                transport.write(_BUSY)
                self._close()
                return
            del self.idle[oldest]  # its `connection_lost` is called later
            oldest._close()  # what it has not read yet of its last response is still sent
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._line = (self._line + data)[:_MAX_LINE_BYTES]
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._line = b""
        self._watch_head()
        cycle: RequestResponseCycle | None = self.cycle
        # h11 passes on what has arrived of a chunk, but its size is known from the beginning
        if cycle is not None and getattr(self.conn._reader, "_bytes_in_chunk", 0) > self.settings.max_body_bytes:
            cycle.scope[BODY_TOO_LARGE] = True  # type: ignore[literal-required]
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()
        self._watch_close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; if a response has begun, only close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(_protocol_error(sys.exc_info()[1]))
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:  # its response can no longer be sent
            cycle.disconnected = True
            cycle.message_event.set()
        self._close()

    def _refuse(self, error: HttpError) -> None:
        """Send an error in the API of the path, if one was read."""
        found = _LINE.match(self._line)
        scope: Mapping[str, object] | None = self.scope
        path = found[1].decode("latin-1") if found else "" if scope is None else str(scope["path"])
        body = as_json(api_of(path).error(error))
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None and not self.transport.is_closing():
            self._read_timer.cancel()
            self._read_timer = None

    def _watch_head(self) -> None:
        """Start or stop the timer of a request's head; bytes that arrive do not restart it."""
        is_idle = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if is_idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.settings.head_timeout_s, self._close)
            self.idle[self] = self.loop.time()
        elif not is_idle and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self.idle.pop(self, None)

    def _close(self) -> None:
        """Close the connection once the client has read what was sent, or stops reading."""
        self.transport.close()
        self._watch_close()

    def _watch_close(self) -> None:
        if self.transport.is_closing():
            self._watch_reader()

    def _watch_reader(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        if self._read_timer is None and num_unread:
            self._num_unread = num_unread
            self._read_timer = self.loop.call_later(self.settings.send_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        """Abort if the client has read nothing; nothing is added to a paused or closing transport."""
        self._read_timer = None
        if self.transport.get_write_buffer_size() >= self._num_unread:
            self.transport.abort()
        else:
            self._watch_reader()


def _protocol_error(error: BaseException | None) -> HttpError:
    """Return the error for what h11 cannot read, or could be read in two ways."""
    status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
    if status == 431:
        return head_too_large()
    if status == 501:
        text = "Transfer-Encoding is not supported: send the body chunked, or with its Content-Length"
        return HttpError(501, text, code="unsupported_encoding")
    what = "it must have exactly one Host header" if "Host" in str(error) else "its head or body is malformed"
    return HttpError(400, f"the request is not valid HTTP/1.1: {what}; send it again", code="bad_request")
