"""A server on a socket, in a thread of this process, and clients that speak HTTP byte by byte."""

import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastapi import FastAPI

from paceline import AsyncEngine
from paceline.server.app import create_app
from paceline.server.run import Server, listening_socket
from paceline.server.settings import ServerSettings

STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")
WAIT_S = 30


@dataclass(frozen=True, slots=True)
class LiveServer:
    """One that listens.

    Attributes:
        said: lines that it printed.
        connections: those that are open.
    """

    app: FastAPI
    port: int
    said: list[str] = field(default_factory=list)
    connections: Collection[object] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        """Number of admitted samples."""
        count: int = self.app.state.service.admission.num_open
        return count

    @contextmanager
    def connect(self, *, receive_bytes: int | None = None) -> Iterator[socket.socket]:
        """A connection.

        Args:
            receive_bytes: that the system keeps for the client, which reads nothing by itself.
        """
        with socket.socket() as connection:
            connection.settimeout(WAIT_S)
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.connect(("127.0.0.1", self.port))
            yield connection

    def sent(self, request: bytes) -> bytes:
        """What comes back to a client that sends this and reads until the connection ends."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)


@contextmanager
def live_server(engine: AsyncEngine, *, send_bytes: int | None = None, **settings: object) -> Iterator[LiveServer]:
    """A server with these settings, until the block ends.

    Args:
        engine: stays the caller's.
        send_bytes: that the system keeps of what a client has not read.
    """
    chosen = ServerSettings(port=0, **settings)  # type: ignore[arg-type]
    app, said = create_app(engine, chosen), list[str]()
    with listening_socket(chosen) as listening:
        if send_bytes is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)  # its connections inherit it
        server = Server(app, app.state.service, listening, said.append)
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]), name="live-server")
        thread.start()
        try:
            until(lambda: server.started)
            yield LiveServer(app, listening.getsockname()[1], said, server.server_state.connections)
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the server does not end"


def head_of(path: str, *, method: str = "GET", **headers: str) -> bytes:
    """The head of a request."""
    given = {"Host": "127.0.0.1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return f"{method} {path} HTTP/1.1\r\n".encode() + b"".join(f"{name}: {value}\r\n".encode() for name, value in given.items()) + b"\r\n"


def post_of(path: str, body: bytes, **headers: str) -> bytes:
    """A request with a JSON body."""
    return head_of(path, method="POST", Content_Type="application/json", Content_Length=str(len(body)), **headers) + body


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side ends the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:  # it had not read all that was sent
        pass
    return b"".join(parts)


def statuses(answer: bytes) -> list[int]:
    """Of all answers that came one after the other."""
    return [int(status) for status in STATUS_LINE.findall(answer)]


def until(is_so: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait for something to become true."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it does not come true"
        time.sleep(0.01)
