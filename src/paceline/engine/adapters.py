"""The LoRA adapters of an engine. They are loaded and removed while requests run, and freed when no request uses them any more."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.request import EngineRequest
from paceline.errors import ConfigError, RequestError
from paceline.models.adapters.adapter import Adapter
from paceline.runtimes.base import Network


@dataclass(slots=True)
class _LoadedAdapter:
    """An adapter, its number in the runtime, and how many unfinished requests use it."""

    adapter: Adapter
    adapter_number: int
    num_requests: int = 0
    is_removed: bool = False


class Adapters:
    """The adapters that requests can select by name. `add`, `remove`, `acquire` and `release` are called between two steps.

    Args:
        runtime: the target model, whose runtime stores the adapters' weights.
    """

    def __init__(self, runtime: Network) -> None:
        self._runtime = runtime
        self._by_name: dict[str, _LoadedAdapter] = {}
        self._adapter_of: dict[EngineRequest, _LoadedAdapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests can select now."""
        return tuple(self._by_name)

    @property
    def loaded(self) -> Sequence[Adapter]:
        """The loaded adapters, in the order of `names`."""
        return [loaded.adapter for loaded in self._by_name.values()]

    def check_name_unused(self, name: str) -> None:
        """Check that no adapter has this name.

        Raises:
            ConfigError: an adapter has this name.
        """
        if name in self._by_name:
            raise ConfigError(f"an adapter named {name!r} is loaded: remove it first, or choose another name")

    def check_loaded(self, name: str | None) -> None:
        """Check that an adapter of this name is loaded. None, the target without an adapter, passes.

        Raises:
            RequestError: no adapter has this name.
        """
        if name is not None and name not in self._by_name:
            text = f"adapter is {name!r}, which is not loaded; loaded: {self._list_names()}"
            raise RequestError(text, parameter="adapter", code="adapter_not_found")

    def add(self, adapter: Adapter, adapter_number: int) -> None:
        """Let requests select an adapter, which the runtime has loaded as `adapter_number`.

        Raises:
            ConfigError: as for `check_name_unused`.
        """
        self.check_name_unused(adapter.name)
        self._by_name[adapter.name] = _LoadedAdapter(adapter, adapter_number)

    def remove(self, name: str) -> None:
        """Reject further requests for an adapter; free it once no request uses it.

        Raises:
            ConfigError: no adapter has this name.
        """
        unchecked_name: object = name
        loaded = self._by_name.pop(name, None) if isinstance(unchecked_name, str) else None
        if loaded is None:
            raise ConfigError(f"there is no adapter {name!r} to remove; loaded: {self._list_names()}")
        loaded.is_removed = True
        self._free_if_unused(loaded)

    def acquire(self, request: EngineRequest) -> None:
        """Assign the selected adapter to a new request, and increment the number of requests that use the adapter.

        Only requests with the same adapter may share cached rows and draft from each other's outputs.

        Raises:
            RequestError: as `check_loaded`.
        """
        if request.adapter is None:
            return
        self.check_loaded(request.adapter)
        loaded = self._adapter_of[request] = self._by_name[request.adapter]
        loaded.num_requests += 1
        request.adapter_number, request.adapter_key = loaded.adapter_number, loaded.adapter.digest
        request.has_mixture_pass = loaded.adapter.mixture is not None
        if request.namespace is not None:
            request.namespace = f"{request.namespace}\0{loaded.adapter.digest.hex()}"

    def release(self, request: EngineRequest) -> None:
        """Decrement the number of requests that use an adapter, because this request has ended."""
        loaded = self._adapter_of.pop(request, None)
        if loaded is not None:
            loaded.num_requests -= 1
            self._free_if_unused(loaded)

    def _list_names(self) -> str:
        return ", ".join(map(repr, self._by_name)) or "none"

    def _free_if_unused(self, loaded: _LoadedAdapter) -> None:
        if loaded.is_removed and loaded.num_requests == 0:
            self._runtime.unload_adapter(loaded.adapter_number)
