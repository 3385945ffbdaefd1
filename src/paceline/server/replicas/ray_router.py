"""`choose_replica` as Ray Serve asks it. Needs Ray (extra `ray`)."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from paceline.server.replicas.routing import DEFAULT_MAX_LEAD, choose_replica


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Counts the requests of each replica and chooses by them and by the request's `key`; a request may name its `replica`."""

    def initialize_state(self, max_lead: int = DEFAULT_MAX_LEAD) -> None:
        self._max_lead = max_lead
        self._loads: Counter[str] = Counter()
        self._num_without_key = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen one, then the others, in case it cannot be reached any more."""
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        asked: dict[str, Any] = {} if pending_request is None else pending_request.kwargs
        wanted = asked.get("replica")
        if wanted is not None:
            return [[replicas[wanted]]] if wanted in replicas else []
        if not replicas:
            return []
        loads = {name: self._loads[name] for name in replicas}
        key = asked.get("key")
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
