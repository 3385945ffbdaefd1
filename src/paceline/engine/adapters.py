"""The adapters of an engine: loaded and removed while requests run, each freed when the last request that began with it has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError, RequestError
from paceline.models.adapters.adapter import Adapter
from paceline.runtimes.base import Network
from paceline.speculation.request import Request


@dataclass(slots=True)
class _Loaded:
    """An adapter in the runtime, and how many requests that have not ended have it."""

    adapter: Adapter
    number: int
    num_requests: int = 0
    is_removed: bool = False


class Adapters:
    """What requests may ask for by name. `put`, `remove`, `hold` and `release` are called between two steps.

    Args:
        runtime: the target.
    """

    def __init__(self, runtime: Network) -> None:
        self._runtime = runtime
        self._by_name: dict[str, _Loaded] = {}
        self._held: dict[Request, _Loaded] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may ask for now."""
        return tuple(self._by_name)

    @property
    def all(self) -> Sequence[Adapter]:
        """The adapters themselves, in the order of `names`."""
        return [loaded.adapter for loaded in self._by_name.values()]

    def check_free(self, name: str) -> None:
        """That no adapter has this name.

        Raises:
            ConfigError: one has.
        """
        if name in self._by_name:
            raise ConfigError(f"an adapter is called {name!r} already: remove it first, or give this one another name")

    def check_known(self, name: str | None) -> None:
        """That an adapter has this name; None = no adapter is asked for.

        Raises:
            RequestError: none has; the error names those there are.
        """
        if name is not None and name not in self._by_name:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise RequestError(f"adapter is {name!r}, which is not loaded; loaded: {known}", parameter="adapter", code="adapter_not_found")

    def put(self, adapter: Adapter, number: int) -> None:
        """Let requests ask for an adapter that the runtime has under this number.

        Raises:
            ConfigError: as `check_free`.
        """
        self.check_free(adapter.name)
        self._by_name[adapter.name] = _Loaded(adapter, number)

    def remove(self, name: str) -> None:
        """Take an adapter away from requests to come; those that have it go on with it.

        Raises:
            ConfigError: no adapter has this name.
        """
        given: object = name
        loaded = self._by_name.pop(name, None) if isinstance(given, str) else None
        if loaded is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise ConfigError(f"there is no adapter {name!r} to remove; loaded: {known}")
        loaded.is_removed = True
        self._free_if_done(loaded)

    def hold(self, request: Request) -> None:
        """Give a request that begins its adapter; its rows, and what drafters may show of it, are those of this adapter alone.

        Raises:
            RequestError: as `check_known`.
        """
        if request.adapter is None:
            return
        self.check_known(request.adapter)
        loaded = self._held[request] = self._by_name[request.adapter]
        loaded.num_requests += 1
        request.adapter_number, request.adapter_key = loaded.number, loaded.adapter.key
        request.has_mixture_pass = loaded.adapter.mixture is not None
        if (namespace := request.hints.namespace) is not None:
            request.hints = replace(request.hints, namespace=f"{namespace}\0{loaded.adapter.key.hex()}")

    def release(self, request: Request) -> None:
        """A request has ended."""
        loaded = self._held.pop(request, None)
        if loaded is not None:
            loaded.num_requests -= 1
            self._free_if_done(loaded)

    def _free_if_done(self, loaded: _Loaded) -> None:
        if loaded.is_removed and loaded.num_requests == 0:
            self._runtime.unload_adapter(loaded.number)
