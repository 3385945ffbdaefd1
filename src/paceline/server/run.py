"""The process of a server: its socket, its models, its signals."""

import asyncio
import faulthandler
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import ConfigError, PacelineError
from paceline.parsing.registry import check_parser_names
from paceline.sampling.params import SamplingParams
from paceline.server.admission import AdmissionControl
from paceline.server.app import create_pool_app
from paceline.server.connection import connection_class
from paceline.server.logs import log_to_stderr
from paceline.server.model_pool import ModelPool
from paceline.server.settings import MAX_HEAD_BYTES, ServerSettings

PrintLine = Callable[[str], None]
_FLUSH_S = 5  # for the errors of aborted requests to be sent
_HANG_S = 5  # until a process that has not ended is exited
_MAX_THREADS, _SPARE_THREADS = 256, 4  # spare: for requests that are not admitted


def run(
    models: Sequence[str], arguments: Mapping[str, Any], settings: ServerSettings, *, print_line: PrintLine, quiet: bool = False
) -> None:
    """Serve models until a signal ends the process: load a single one now, and each of several when it is first requested.

    Args:
        models: one or more, as `AsyncEngine.open` takes them.
        arguments: further ones of it, for every model.
        print_line: takes lines for the person who started the server.
        quiet: whether to write only warnings and errors.

    Raises:
        PacelineError: the address cannot be listened on, the model cannot be loaded, or one of several cannot be read.
    """
    check_parser_names(settings.tool_call_parser, settings.reasoning_parser)
    with listening_socket(settings) as listening:
        pool = _pool(models, arguments, settings, print_line=print_line, quiet=quiet)
        try:
            serve_application(create_pool_app(pool), pool, listening, quiet=quiet)
        finally:
            asyncio.run(pool.close())
            faulthandler.cancel_dump_traceback_later()


def _pool(
    models: Sequence[str], arguments: Mapping[str, Any], settings: ServerSettings, *, print_line: PrintLine, quiet: bool
) -> ModelPool:
    if len(models) > 1:
        pool = ModelPool.of_names(models, arguments, settings)
        if not quiet:
            print_line(f"{len(models)} models, loaded when they are requested, {settings.max_loaded} at a time")
        return pool
    reopen = partial(AsyncEngine.open, **{**arguments, "model": models[0]})
    engine = reopen()
    for notice in engine.loaded.notices:
        print_line(notice)
    try:
        pool = ModelPool.of_engine(engine, settings, reopen)
    except PacelineError:
        asyncio.run(engine.close())
        raise
    if not quiet:
        defaults = engine.loaded.sampling_defaults
        print_line(engine.loaded.banner)
        if engine.loaded.input_processor.tokenizer.has_chat_template:
            print_line(f"{defaults.describe(defaults.apply_chat_defaults(SamplingParams(), ()))}, where a conversation leaves it open")
        else:
            print_line("the model has no chat template: texts are completed (/v1/completions, /api/generate), messages are refused")
        print_line(engine.loaded.cache_banner)
    return pool


class ServedService(Protocol):
    """The part of a model pool, or of the front of replicas, that a server uses."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def model(self) -> str: ...
    @property
    def admission(self) -> AdmissionControl: ...
    async def close(self) -> None:
        """Abort what runs, and end all engines."""


def serve_application(app: ASGIApp, service: ServedService, listening: socket.socket, *, quiet: bool = False) -> None:
    """Serve an application until a signal ends it; notices and log go to stderr without blocking.

    After a signal the process exits if it has not ended in time (`exit_within`). The caller cancels that when everything has ended.
    """
    with log_to_stderr(logging.WARNING if quiet else logging.INFO) as lines:
        _warn(service.settings, lines.print_line)
        _reduce_event_loop_stalls()
        Server(app, service, listening, lines.print_line).run(sockets=[listening])


def _reduce_event_loop_stalls() -> None:
    """Let the event loop interrupt worker threads sooner, and keep the garbage collector from visiting the model's objects."""
    sys.setswitchinterval(0.0002)  # 1 ms, each time a step asks for the interpreter lock, made steps of 0.2 s beside a body being parsed
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """Uvicorn's server with a drain: a signal lets running requests finish, a second one aborts them, a third one exits.

    Args:
        service: of the application.
        listening: a bound socket; it stays the caller's.
        print_line: takes lines for the person who started the server. It is called in the event loop and must not block.
    """

    def __init__(self, app: ASGIApp, service: ServedService, listening: socket.socket, print_line: PrintLine) -> None:
        config = uvicorn.Config(
            app,
            http=connection_class(service.settings),  # not uvicorn's automatic choice: each HTTP implementation has other limits
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,  # its lines repeat paths and texts of errors
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_FLUSH_S,
        )
        self._service = service
        super().__init__(config)
        self._listening, self._print_line = listening, print_line
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if isinstance(self._service, ModelPool):
            self._service.start_idle_timers()
        # a thread for each admitted request: none waits while others tokenise or compile a grammar
        num_threads = min(_MAX_THREADS, self._service.admission.limit + _SPARE_THREADS)
        self._loop.set_default_executor(ThreadPoolExecutor(num_threads, "paceline-prepare"))
        host, port = self._listening.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{port}"
        self._print_line(f"{self._service.model} answers at {url}/v1 (OpenAI) and {url} (Anthropic, Ollama); chat page: {url}/")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        exit_within((self._service.settings.drain_s if self._num_signals == 1 else 0.0) + _FLUSH_S + _HANG_S)
        if self._loop is None or self._num_signals > 2:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain if self._num_signals == 1 else self._abort)

    def _begin_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        admission, drain_s = self._service.admission, self._service.settings.drain_s
        if admission.num_open:
            self._print_line(f"shutting down: {admission.num_open} running samples get {drain_s:g} s to finish")
        if not await admission.drain(drain_s):
            what = f"{admission.num_open} samples" if admission.num_open else "requests"
            self._print_line(f"{what} were not finished within {drain_s:g} s and were aborted")
        await self._service.close()  # even if nothing runs: requests whose client disconnected may have left work
        admission.abort()  # those that are not admitted, such as one whose body has not arrived
        self.should_exit = True

    def _abort(self) -> None:
        """End every request with an error in its API, then exit without waiting for the engine."""
        self._service.admission.is_draining = True
        self._service.admission.abort()
        self.should_exit = True


def exit_within(seconds: float) -> None:
    """Exit the process with code 1 after a time, whatever hangs in it; a later call replaces the time."""
    nowhere = open(os.devnull, "wb")  # noqa: SIM115  # stderr may be a pipe that is not read
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


def listening_socket(settings: ServerSettings) -> socket.socket:
    """Return a bound socket, before the slow load of a model; ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        place = f"host {settings.host} port {settings.port}"
        raise ConfigError(f"{place} cannot be listened on ({error.strerror}): choose another --port, or 0 for any free one") from None
    return bound


def _warn(settings: ServerSettings, print_line: PrintLine) -> None:
    if "*" in settings.allow_origin and not settings.api_keys:
        print_line("WARNING: --allow-origin * without an API key: scripts of every web page that is open on this machine can use the model")
    if settings.is_loopback:
        return
    print_line(f"WARNING: {settings.host} can be reached from other machines, and HTTP is not encrypted: use a proxy with TLS")
    if not settings.api_keys:
        print_line("WARNING: there is no API key: anyone who reaches this address can use the model")
