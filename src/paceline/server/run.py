"""A process that serves: its socket, its model, and its end."""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import ConfigError
from paceline.parsing.registry import check_parser_names
from paceline.server.admission import AdmissionControl
from paceline.server.app import create_app
from paceline.server.connection import connection_class
from paceline.server.logs import log_to_stderr
from paceline.server.settings import MAX_HEAD_BYTES, ServerSettings
from paceline.server.shutdown_watchdog import ShutdownWatchdog

Say = Callable[[str], None]
_LAST_WORDS_S = 5  # for answers that are cut off to be sent
_MORE_S = 10  # until a process that still has not ended is ended from outside its loop
_MAX_THREADS, _MORE_THREADS = 256, 4  # more: for requests that no admission counts


def run(arguments: Mapping[str, Any], settings: ServerSettings, *, say: Say, quiet: bool = False) -> None:
    """Load a model and answer until a signal ends the process.

    Args:
        arguments: of `AsyncEngine.open`.
        say: takes lines for the person who started it.
        quiet: whether to say and log only what is wrong.

    Raises:
        PacelineError: the address cannot be listened on, or the model cannot be loaded.
    """
    check_parser_names(settings.tool_call_parser, settings.reasoning_parser)
    with listening_socket(settings) as listening, ShutdownWatchdog() as watch:
        engine = AsyncEngine.open(**arguments)
        try:
            for notice in engine.opened.notices:
                say(notice)
            app = create_app(engine, settings)
            if not quiet:
                say(engine.opened.banner)
            serve_application(app, app.state.service, listening, watch, quiet=quiet)
        finally:
            asyncio.run(engine.close())


class Closable(Protocol):
    """What works behind an application."""

    async def close(self) -> None:
        """Give up what runs, and end."""


class Served(Protocol):
    """What a server needs of the application's service."""

    @property
    def engine(self) -> Closable: ...
    @property
    def settings(self) -> ServerSettings: ...
    @property
    def model(self) -> str: ...
    @property
    def admission(self) -> AdmissionControl: ...


def serve_application(app: ASGIApp, service: Served, listening: socket.socket, watch: ShutdownWatchdog, *, quiet: bool = False) -> None:
    """Answer with an application until a signal ends it; what is said and logged meanwhile goes to stderr and waits for nobody."""
    with log_to_stderr(logging.WARNING if quiet else logging.INFO) as lines:
        _warn(service.settings, lines.say)
        Server(app, service, listening, lines.say, watch).run(sockets=[listening])


class Server(uvicorn.Server):
    """Uvicorn's server, which at a signal first lets requests finish; those that take too long are told so.

    Args:
        service: of the application.
        listening: a bound socket; it stays the caller's.
        say: takes lines for the person who started it. It is called in the event loop and must not wait.
        watch: ends the process where a signal does not; None = nobody does.
    """

    def __init__(self, app: ASGIApp, service: Served, listening: socket.socket, say: Say, watch: ShutdownWatchdog | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=connection_class(service.settings),  # not whichever is installed: each has other limits
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,  # what it would log repeats paths and errors' texts
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        self._service = service
        super().__init__(config)
        self._listening, self._say, self._watch = listening, say, watch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        # a thread for each request that is let in, so that none waits while those of others tokenise or compile
        self._loop.set_default_executor(
            ThreadPoolExecutor(min(_MAX_THREADS, self._service.admission.limit + _MORE_THREADS), "paceline-prepare")
        )
        host, port = self._listening.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        self._say(f"{self._service.model} answers at http://{name}:{port}/v1, and to people at http://{name}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_forced = self._is_told or self._loop is None
        if self._watch is not None:
            self._watch.exit_within(_MORE_S + (0.0 if is_forced else self._service.settings.drain_s + _LAST_WORDS_S))
        if is_forced or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        admission, drain_s = self._service.admission, self._service.settings.drain_s
        if admission.num_open:
            self._say(f"ending: {admission.num_open} samples get {drain_s:g} s to finish")
        if not await admission.drain(drain_s):
            what = f"{admission.num_open} samples" if admission.num_open else "requests"
            self._say(f"{what} were not finished in {drain_s:g} s and are given up")
        await self._service.engine.close()  # also where nothing is left: clients that are gone may have left work behind
        self.should_exit = True


def listening_socket(settings: ServerSettings) -> socket.socket:
    """A socket that is bound before a model is loaded for it.

    Raises:
        ConfigError: the address is taken, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        place = f"host {settings.host} port {settings.port}"
        raise ConfigError(f"{place} cannot be listened on ({error.strerror}): choose another --port, or 0 for a free one") from None
    return bound


def _warn(settings: ServerSettings, say: Say) -> None:
    if settings.is_loopback:
        return
    say(f"WARNING: {settings.host} can be reached from other machines, and HTTP is not encrypted: put a proxy with TLS in front")
    if not settings.api_keys:
        say("WARNING: there is no key: everybody who reaches this address can use the model")
