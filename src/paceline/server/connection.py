"""One client's connection: uvicorn's HTTP/1.1, with an end to waiting for clients that are silent, slow, or too many.

uvicorn waits without limit for the head of a request, and for a client that does not read its answer.
"""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from paceline.server.settings import ServerSettings

_BUSY_BODY = b'{"error":{"message":"too many connections are open: ask again later","type":"rate_limit_error","param":null,"code":"busy"}}'
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
_BUSY += b"Content-Length: %d\r\n\r\n%b" % (len(_BUSY_BODY), _BUSY_BODY)


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

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()
        self._watch_end()

    def send_400_response(self, msg: str) -> None:
        """Say that this is no HTTP; where the answer to an earlier part is under way, or sent, the connection just ends."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:  # what it still says would have no place
            cycle.disconnected = True
            cycle.message_event.set()
        self._close()

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
