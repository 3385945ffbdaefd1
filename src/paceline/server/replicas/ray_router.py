"""Ray Serve's request router by prefix. Needs Ray (extra `ray`)."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from paceline.server.replicas.routing import DEFAULT_MAX_LEAD, choose_replica


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Chooses a replica by the load of each and by the request's `key`; a request may name its `replica`."""

    def initialize_state(self, max_lead: int = DEFAULT_MAX_LEAD) -> None:
        self._max_lead = max_lead
        self._loads: Counter[str] = Counter()
        self._num_without_key = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others as fallbacks."""
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        arguments: dict[str, Any] = {} if pending_request is None else pending_request.kwargs
        named = arguments.get("replica")
        if named is not None:
            return [[replicas[named]]] if named in replicas else []
        if not replicas:
            return []
        loads = {name: self._loads[name] for name in replicas}
        key = arguments.get("key")
        if key is None:
            self._num_without_key += 1
            chosen = choose_replica(loads, self._num_without_key, max_lead=0)
        else:
            chosen = choose_replica(loads, key, max_lead=self._max_lead)
        others = [one for name, one in replicas.items() if name != chosen]
        return [[replicas[chosen]], others] if others else [[replicas[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        self._loads[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self._loads[replica_id.unique_id] -= 1
        if self._loads[replica_id.unique_id] <= 0:
            del self._loads[replica_id.unique_id]
