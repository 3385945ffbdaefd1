"""One client's connection: uvicorn's HTTP/1.1, with an end to waiting for clients that are silent, slow, or too many.

uvicorn waits without limit for the head of a request, and for a client that does not read its answer.
"""

import asyncio
import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from paceline.server.dialects import dialect_of
from paceline.server.errors import HttpError, head_too_large
from paceline.server.framing import as_json
from paceline.server.settings import ServerSettings

_BUSY_BODY = b'{"error":{"message":"too many connections are open: ask again later","type":"rate_limit_error","param":null,"code":"busy"}}'
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
_BUSY += b"Content-Length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)
_LINE = re.compile(rb"[A-Z]+ (?:https?://[^/ ]*)?(/[^ ?]*)")
_MAX_LINE = 1024  # bytes of a request's first line that are looked at for its path


def connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """What uvicorn makes of every connection (`Config.http`)."""
    return type("LimitedConnection", (Connection,), {"settings": settings})


class Connection(H11Protocol):
    """A connection that ends when its limits are reached.

    Attributes:
        settings: its limits are `max_connections`, `head_timeout_s` and `send_timeout_s`.
    """

    settings: ClassVar[ServerSettings]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        self._line = b""  # the beginning of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.write(_BUSY)
            self._close()
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._line = (self._line + data)[:_MAX_LINE]
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._line = b""
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()
        self._watch_end()

    def send_400_response(self, msg: str) -> None:
        """Say that this is no HTTP; where the answer to an earlier part is under way, or sent, the connection just ends."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(_unreadable(sys.exc_info()[1]))
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:  # what it still says would have no place
            cycle.disconnected = True
            cycle.message_event.set()
        self._close()

    def _refuse(self, error: HttpError) -> None:
        """Answer in the dialect of the path, if a path was named."""
        found = _LINE.match(self._line)
        scope: Mapping[str, object] | None = self.scope
        path = found[1].decode("latin-1") if found else "" if scope is None else str(scope["path"])
        body = as_json(dialect_of(path).error(error))
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_end()

    def pause_writing(self) -> None:
        """As much as is kept waits to be read by the client."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_reader()

    # A request's head

    def _watch_head(self) -> None:
        """Begin to wait for a head, or end it: a byte now and then does not make the time longer."""
        is_awaited = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if is_awaited and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.settings.head_timeout_s, self._close)
        elif not is_awaited and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # A client that reads

    def _close(self) -> None:
        """End the connection when the client has read what is under way, or does not go on reading."""
        self.transport.close()
        self._watch_end()

    def _watch_end(self) -> None:
        if self.transport.is_closing():
            self._watch_reader()

    def _watch_reader(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        if self._read_timer is None and num_unread:
            self._num_unread = num_unread
            self._read_timer = self.loop.call_later(self.settings.send_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        """Nothing is added while this waits, so that a client that reads leaves less."""
        self._read_timer = None
        if self.transport.get_write_buffer_size() >= self._num_unread:
            self.transport.abort()
        else:
            self._watch_reader()

    def _forget_reader(self) -> None:
        if self._read_timer is not None and not self.transport.is_closing():
            self._read_timer.cancel()
            self._read_timer = None


def _unreadable(error: BaseException | None) -> HttpError:
    """What a client is told whose request is no HTTP that can be read in one way only."""
    status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
    if status == 431:
        return head_too_large()
    if status == 501:
        text = "Transfer-Encoding is none that is served: send the body chunked, or with its Content-Length"
        return HttpError(501, text, code="unsupported_encoding")
    what = "its head does not have exactly one Host" if "Host" in str(error) else "its head or its body breaks the rules of HTTP/1.1"
    return HttpError(400, f"the request cannot be read: {what}; send it again as HTTP/1.1", code="bad_request")
