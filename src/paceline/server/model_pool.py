"""The models of a server: loaded on first use, unloaded when they are idle or when another one needs the room.

A request for a model that is not loaded waits. Models are loaded in the order in which the first waiting request for each arrived. To make
room, the least recently used model takes no further requests, finishes those that it has, and is unloaded. Requests that arrive for it
meanwhile wait their turn, so that no model waits longer than the running requests of others take.
"""

import asyncio
import gc
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.loader import parse_settings
from paceline.errors import CapacityError, ConfigError, PacelineError
from paceline.machine import available_memory_bytes, return_free_memory
from paceline.server.admission import AdmissionControl, shutting_down
from paceline.server.errors import HttpError, http_error_of
from paceline.server.metrics import EngineSnapshot, Metrics, merged_pages
from paceline.server.model_facts import ModelFacts, template_facts
from paceline.server.service import Service, adapter_of, is_same_model, matches_model_name, model_not_found
from paceline.server.settings import ServerSettings
from paceline.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("paceline.server")

_MEMORY_PER_BYTE = 1.25
"""Memory that loading a model takes, for each byte of its files; its cache grows later."""
_FREEING_DELAYS_S = (0.0, 0.05, 0.2, 0.5)
"""Before each attempt to free an unloaded model, which a request that just ended may hold a moment longer."""
_SINGLE_MODEL_SETTINGS = ("adapters", "merge_adapter", "draft_adapter", "gguf_file", "revision")


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model that requests can name.

    Attributes:
        name: in requests and answers.
        engine: its settings.
        open: loads it; None = its engine is the caller's and stays loaded.
        service: answers requests; None = it is not loaded.
        num_requests: requests that use `service`.
        is_closing: whether `service` takes no further requests.
        waiting: requests that wait until it is loaded, each with the stack that is closed when it has ended.
        keep_s: seconds without requests after which it is unloaded; infinite = never.
        unload_at_s: when that is, in the loop's time; None = it is in use, or stays.
        last_used_s: when its last request ended.
        snapshot: of its engine's counters, when they were last read.
        idle: set when its last request ends.
    """

    name: str
    engine: EngineConfig
    facts: ModelFacts
    open: Callable[[], AsyncEngine] | None
    service: Service | None = None
    num_requests: int = 0
    is_closing: bool = False
    waiting: "list[tuple[asyncio.Future[Service], ExitStack]]" = field(default_factory=list)
    keep_s: float = math.inf
    unload_at_s: float | None = None
    last_used_s: float = 0.0
    snapshot: EngineSnapshot = field(default_factory=EngineSnapshot)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _timer: asyncio.TimerHandle | None = None
    _template: tuple[str, tuple[str, ...]] | None = None

    @property
    def state(self) -> str:
        """Return "loaded", "loading" (or waiting for that) or "unloaded"."""
        return "loaded" if self.service is not None else "loading" if self.waiting else "unloaded"

    @property
    def adapters(self) -> Sequence[str]:
        return tuple(self.engine.adapters) if self.service is None else self.service.engine.adapters

    @property
    def drafters(self) -> Sequence[str]:
        """Names of its drafters; none while it is not loaded."""
        return [] if self.service is None else sorted(self.service.engine.loaded.engine.speculator.drafter_names)

    def adapter_of(self, name: str | None) -> str | None:
        """See `Service.adapter_of`."""
        return adapter_of(name, self.name, self.adapters)

    def template(self) -> tuple[str, tuple[str, ...]]:
        """Return its `template_facts`. Slow: call it in a thread.

        Raises:
            HttpError: its files cannot be read.
        """
        service = self.service
        if self._template is None:
            loaded = None if service is None else service.engine.loaded.input_processor.tokenizer
            try:
                self._template = template_facts(loaded or Tokenizer.open(self.facts.path))
            except PacelineError as error:
                raise _load_error(self, error) from error
        return self._template

    def set_timer(self, unload: Callable[[], object] | None) -> None:
        """Replace the timer: call `unload` after `keep_s`; None = no timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.unload_at_s = None
        if unload is not None and self.open is not None and self.keep_s < math.inf:
            loop = asyncio.get_running_loop()
            self.unload_at_s = loop.time() + self.keep_s
            self._timer = loop.call_at(self.unload_at_s, unload)


class ModelPool:
    """The served models; at most `settings.max_loaded` of them are loaded at a time. Belongs to one event loop.

    Args:
        models: one or more.
        num_running: samples that run at a time, for admission control.

    Attributes:
        logged_fields: names of ignored fields that the log has already.

    Raises:
        ConfigError: two models have one name.
    """

    def __init__(self, models: Sequence[ServedModel], settings: ServerSettings, num_running: int) -> None:
        self.models, self.settings = models, settings
        for index, model in enumerate(models):
            model.keep_s = settings.unload_after_s
            if any(is_same_model(model.name, other.name) for other in models[:index]):
                raise ConfigError(f"two models are called {model.name!r}: rename a file or directory, or serve a link with another name")
        self.admission = AdmissionControl(num_running, settings.max_queue)
        self._metrics = {model.name: Metrics(model.name) for model in models}
        self.logged_fields = set[str]()
        self._queue: list[ServedModel] = []  # those that requests wait for
        self._switch = asyncio.Lock()  # held while a model is loaded or unloaded
        self._loader = ThreadPoolExecutor(1, "paceline-load")  # one thread, so that all models use one heap of glibc
        self._tasks = set["asyncio.Task[None]"]()
        self._is_loading = False

    @classmethod
    def of_engine(cls, engine: AsyncEngine, settings: ServerSettings, reopen: Callable[[], AsyncEngine] | None = None) -> "ModelPool":
        """Return the pool of one model that is loaded.

        Args:
            reopen: loads it again after it was unloaded; None = the engine is the caller's, and stays loaded.

        Raises:
            ConfigError: a parser of the settings does not exist, or an adapter has the name of the model.
        """
        loaded = engine.loaded
        name = settings.served_model_name or served_model_name(loaded.config.model)
        model = ServedModel(name, loaded.config, ModelFacts.of_loaded(loaded), reopen)
        pool = cls([model], settings, loaded.engine.scheduler.limits.max_num_seqs)
        pool._begin(model, engine)
        return pool

    @classmethod
    def of_names(cls, names: Sequence[str], arguments: Mapping[str, Any], settings: ServerSettings) -> "ModelPool":
        """Return the pool of several models. None is loaded yet.

        Args:
            names: as `AsyncEngine.open` takes them.
            arguments: further ones of it, for every model.

        Raises:
            PacelineError: the headers of a model's files cannot be read, or an argument or a setting belongs to one model.
        """
        given = {name: arguments.get(name) for name in _SINGLE_MODEL_SETTINGS}
        given |= {name: getattr(settings, name) for name in ("served_model_name", "adapter_loading")}
        for name in (name for name, value in given.items() if value):
            raise ConfigError(f"{name} belongs to one model, and {len(names)} are served: leave it out, or serve one model")
        models = []
        for name in names:
            own = {**arguments, "model": name}
            config = parse_settings(name, own)[0]
            models.append(ServedModel(served_model_name(name), config, ModelFacts.read(config), partial(AsyncEngine.open, **own)))
        return cls(models, settings, models[0].engine.max_num_seqs * min(settings.max_loaded, len(models)))

    @property
    def model(self) -> str:
        return ", ".join(model.name for model in self.models)

    @property
    def unloads(self) -> bool:
        """Whether models are unloaded. A single one stays, unless a setting limits its time."""
        return len(self.models) > 1 or self.settings.unload_after_s < math.inf

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a request, which may name an adapter of a single one; the first one if it names none.

        Raises:
            HttpError: 404, it is not served.
        """
        if len(self.models) == 1:
            self.models[0].adapter_of(name)
            return self.models[0]
        if name is None:
            return self.models[0]
        for is_meant in (is_same_model, matches_model_name):
            for model in self.models:
                if is_meant(name, model.name):
                    return model
        raise model_not_found(name, *(repr(model.name) for model in self.models))

    def take_loaded(self, model: ServedModel, at_end: ExitStack) -> Service | None:
        """Return the service that answers a request; None = the model is not loaded, or is about to be unloaded: `wait` for it.

        Args:
            at_end: closed when the request has ended.
        """
        return None if model.service is None or model.is_closing else self._take(model, model.service, at_end)

    async def wait(self, model: ServedModel, at_end: ExitStack) -> Service:
        """Wait until a model is loaded, and return what answers the request.

        Raises:
            HttpError: it cannot be loaded, not within `request_timeout_s`, the queue is full, or the server shuts down.
        """
        with self.admission.admitted(1, "model"):
            loaded: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
            model.waiting.append((loaded, at_end))
            if model not in self._queue:
                self._queue.append(model)
            if not self._is_loading:
                self._is_loading = True
                self._start(self._load_waiting())
            try:
                async with asyncio.timeout(self.settings.request_timeout_s):
                    return await loaded
            except TimeoutError:
                text = f"the model was not loaded within {self.settings.request_timeout_s:g} s, because others were in use: retry later"
                raise HttpError(504, text, kind="timeout_error", code="timeout") from None
            finally:
                model.waiting = [one for one in model.waiting if one[0] is not loaded]
                if not model.waiting:
                    for other in self.models:  # none has to be unloaded for this model any more
                        other.idle.set()

    def start_idle_timers(self) -> None:
        """Start the idle timers of models that were loaded before the event loop ran."""
        for model in self.models:
            self._restart_idle_timer(model)

    def unload_soon(self, model: ServedModel) -> None:
        """Unload a model as soon as no request uses it."""
        model.keep_s = 0.0
        self._restart_idle_timer(model)

    def count_response(self, route: str | None, status: int | None, model: str | None) -> None:
        """Count a response in the metrics. model: None if the request named no model."""
        first = self.models[0].name
        self._metrics[first].count_response(route, status, model or (first if len(self.models) == 1 else ""))

    async def metrics(self) -> str:
        """Return the metrics of all models in Prometheus's text form."""
        for model in self.models:
            if model.service is not None:
                model.snapshot = await EngineSnapshot.of(model.service.engine, model.snapshot.num_loads)
        return merged_pages(self._metrics[model.name].text(model.snapshot) for model in self.models)

    async def close(self) -> None:
        """Abort running and waiting requests, and close all engines. May be called again."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._loader.shutdown(wait=False)
        for model in self.models:
            model.set_timer(None)
            for loaded, _ in model.waiting:
                if not loaded.done():
                    loaded.set_exception(shutting_down())
            if model.service is not None:
                await model.service.engine.close()

    def _take(self, model: ServedModel, service: Service, at_end: ExitStack) -> Service:
        model.set_timer(None)
        model.num_requests += 1
        at_end.callback(self._release, model)
        return service

    def _release(self, model: ServedModel) -> None:
        model.num_requests -= 1
        model.last_used_s = time.monotonic()
        if not model.num_requests:
            model.idle.set()
            self._restart_idle_timer(model)

    def _restart_idle_timer(self, model: ServedModel) -> None:
        if model.service is not None and not model.num_requests:
            model.set_timer(lambda: self._start(self._unload_idle(model)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task of this pool."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_waiting(self) -> None:
        """Load the models that requests wait for, one after the other."""
        try:
            while self._queue:
                model, error = self._queue[0], None
                try:
                    async with self._switch:
                        if model.service is None and model.waiting:
                            await self._load(model)
                except Exception as raised:
                    error = raised
                self._queue.pop(0)
                self._end_waiting(model, error)
        finally:
            self._is_loading = False

    def _end_waiting(self, model: ServedModel, error: Exception | None) -> None:
        waiting, model.waiting = model.waiting, []
        for loaded, at_end in waiting:
            if loaded.done():  # its client disconnected
                continue
            if model.service is not None:
                loaded.set_result(self._take(model, model.service, at_end))
            else:
                loaded.set_exception(_load_error(model, error))
        self._restart_idle_timer(model)  # its clients may all have disconnected while it was being loaded

    async def _load(self, model: ServedModel) -> None:
        """Make room for a model and load it, unless its requests end before.

        Raises:
            Exception: it cannot be loaded.
        """
        assert model.open is not None
        # its file may have changed, and what is wrong with its headers is found before another model is unloaded
        model.facts = await asyncio.to_thread(ModelFacts.read, model.engine)
        while True:
            await self._make_room(model)
            if not model.waiting:
                return
            try:
                began_s = time.monotonic()
                self._begin(model, await asyncio.get_running_loop().run_in_executor(self._loader, model.open))
                break
            except CapacityError:
                if not await self._unload_least_used(model):
                    raise
        if gc.get_freeze_count():  # as at the server's start, so that the garbage collector does not visit the model's objects
            gc.freeze()
        _log("model_loaded", model, seconds=round(time.monotonic() - began_s, 3))

    def _begin(self, model: ServedModel, engine: AsyncEngine) -> None:
        model.service = Service.of(engine, model.name, self.settings, self.admission, self._metrics[model.name])
        model.snapshot = EngineSnapshot(num_loads=model.snapshot.num_loads + 1)
        model.facts = replace(model.facts, max_model_len=engine.loaded.input_processor.max_model_len)

    async def _make_room(self, model: ServedModel) -> None:
        """Unload others while there are too many, or memory is short."""
        while model.waiting:
            num_loaded = sum(one.service is not None for one in self.models)
            has_memory = available_memory_bytes() >= _MEMORY_PER_BYTE * model.facts.num_bytes
            if num_loaded == 0 or (num_loaded < self.settings.max_loaded and has_memory):
                return
            await self._unload_least_used(model)

    async def _unload_least_used(self, wanted: ServedModel) -> bool:
        """Unload the model that was used least recently, an idle one if there is one; return False if none is loaded."""
        loaded = [one for one in self.models if one.service is not None]
        if loaded:
            await self._unload(min(loaded, key=lambda one: (one.num_requests > 0, one.last_used_s)), wanted)
        return bool(loaded)

    async def _unload_idle(self, model: ServedModel) -> None:
        """Unload a model whose timer has ended, unless it was used again."""
        async with self._switch:
            due_s = model.unload_at_s
            if model.service is not None and due_s is not None and asyncio.get_running_loop().time() >= due_s - 1:
                await self._unload(model)

    async def _unload(self, model: ServedModel, wanted: ServedModel | None = None) -> None:
        """Wait until the requests of a model have ended, then free it. Keep it if no request waits for `wanted` any more."""
        model.is_closing = True
        try:
            while model.num_requests:
                model.idle.clear()
                await model.idle.wait()
                if wanted is not None and not wanted.waiting:
                    return
            model.set_timer(None)
            assert model.service is not None
            engine, model.service = model.service.engine, None
            with suppress(PacelineError):  # its thread may have ended by an error
                model.snapshot = await EngineSnapshot.of(engine, model.snapshot.num_loads)
            model.snapshot = model.snapshot.unloaded()
            await engine.close()
            runtime = weakref.ref(engine.loaded.engine.runtime)
        finally:
            model.is_closing = False
        del engine
        for delay_s in _FREEING_DELAYS_S:
            await asyncio.sleep(delay_s)
            _free_memory()
            if runtime() is None:
                break
        _log("model_unloaded", model, **({} if runtime() is None else {"memory": "held"}))


def served_model_name(model: str) -> str:
    """Return the name of a model in requests; of a path only its last part, as clients need not see folders."""
    return Path(os.path.abspath(model)).name if Path(model).exists() else model


def _load_error(model: ServedModel, error: Exception | None) -> HttpError:
    """Return the answer to a request whose model could not be loaded; folders of the server are left out of its text."""
    if not isinstance(error, PacelineError):
        return http_error_of(error or RuntimeError("the model is not loaded"))
    text = f"the model {model.name!r} cannot be loaded: {error}".replace(f"{model.facts.path.parent}{os.sep}", "")
    if isinstance(error, CapacityError):
        return HttpError(507, text, kind="server_error", code="out_of_memory")
    return HttpError(500, text, kind="server_error", code="model_not_loaded")


def _free_memory() -> None:
    """Free what an engine left in cycles, and return memory that glibc keeps in the heaps of threads; takes about 0.1 s."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    return_free_memory()


def _log(event: str, model: ServedModel, **fields: Any) -> None:
    log.info("%s", json.dumps({"event": event, "model": model.name, **fields}))
