"""LoRA adapters of an engine: loaded and removed while requests run, and freed when the last request that uses them has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.request import EngineRequest
from paceline.errors import ConfigError, RequestError
from paceline.models.adapters.adapter import Adapter
from paceline.runtimes.base import Network


@dataclass(slots=True)
class _LoadedAdapter:
    """An adapter, its number in the runtime, and the number of requests that use it."""

    adapter: Adapter
    number: int
    num_requests: int = 0
    is_removed: bool = False


class Adapters:
    """The adapters that requests can select by name. `add`, `remove`, `hold` and `release` are called between two steps.

    Args:
        runtime: the target.
    """

    def __init__(self, runtime: Network) -> None:
        self._runtime = runtime
        self._by_name: dict[str, _LoadedAdapter] = {}
        self._held: dict[EngineRequest, _LoadedAdapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests can select now."""
        return tuple(self._by_name)

    @property
    def all(self) -> Sequence[Adapter]:
        """The loaded adapters, in the order of `names`."""
        return [loaded.adapter for loaded in self._by_name.values()]

    def check_free(self, name: str) -> None:
        """Check that no adapter has this name.

        Raises:
            ConfigError: one has.
        """
        if name in self._by_name:
            raise ConfigError(f"an adapter is called {name!r} already: remove it first, or give this one another name")

    def check_known(self, name: str | None) -> None:
        """Check that an adapter has this name; None = no adapter.

        Raises:
            RequestError: none has.
        """
        if name is not None and name not in self._by_name:
            text = f"adapter is {name!r}, which is not loaded; loaded: {self._listed()}"
            raise RequestError(text, parameter="adapter", code="adapter_not_found")

    def add(self, adapter: Adapter, number: int) -> None:
        """Make an adapter that the runtime has under this number available to requests.

        Raises:
            ConfigError: as `check_free`.
        """
        self.check_free(adapter.name)
        self._by_name[adapter.name] = _LoadedAdapter(adapter, number)

    def remove(self, name: str) -> None:
        """Make an adapter unavailable to further requests.

        Raises:
            ConfigError: no adapter has this name.
        """
        given: object = name
        loaded = self._by_name.pop(name, None) if isinstance(given, str) else None
        if loaded is None:
            raise ConfigError(f"there is no adapter {name!r} to remove; loaded: {self._listed()}")
        loaded.is_removed = True
        self._free_if_unused(loaded)

    def hold(self, request: EngineRequest) -> None:
        """Assign its adapter to a request that starts. Cached rows and drafters' finished outputs are shared per adapter only.

        Raises:
            RequestError: as `check_known`.
        """
        if request.adapter is None:
            return
        self.check_known(request.adapter)
        loaded = self._held[request] = self._by_name[request.adapter]
        loaded.num_requests += 1
        request.adapter_number, request.adapter_key = loaded.number, loaded.adapter.digest
        request.has_mixture_pass = loaded.adapter.mixture is not None
        if request.namespace is not None:
            request.namespace = f"{request.namespace}\0{loaded.adapter.digest.hex()}"

    def release(self, request: EngineRequest) -> None:
        """Release the adapter of a request that has ended."""
        loaded = self._held.pop(request, None)
        if loaded is not None:
            loaded.num_requests -= 1
            self._free_if_unused(loaded)

    def _listed(self) -> str:
        return ", ".join(map(repr, self._by_name)) or "none"

    def _free_if_unused(self, loaded: _LoadedAdapter) -> None:
        if loaded.is_removed and loaded.num_requests == 0:
            self._runtime.unload_adapter(loaded.number)
