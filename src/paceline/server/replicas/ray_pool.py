"""Replicas as a deployment of Ray Serve, which watches and restarts them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from paceline.errors import CapacityError, library_errors
from paceline.server.replicas.pool import Head, Question, ReplicaLostError, ReplicaPool
from paceline.server.replicas.ray_cluster import actor_options
from paceline.server.replicas.replica import Replica, replica_settings
from paceline.server.replicas.settings import ClusterSettings
from paceline.server.settings import ServerSettings

DEPLOYMENT = "Replica"
ROUTER = "paceline.server.replicas.ray_router.PrefixRouter"
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
_MORE_THAN_SAMPLES = 64  # requests that a replica's own admission refuses, and questions about its state
_STATUS_S = 1.0


class RayPool(ReplicaPool):
    """Engines in processes of their own, on one machine or several.

    Args:
        ray: the module, connected.
        name: of the application in the cluster; another one of this name is replaced.
        arguments: of `AsyncEngine.open`.

    Raises:
        CapacityError: the replicas could not be started.
    """

    def __init__(self, ray: Any, name: str, cluster: ClusterSettings, arguments: Mapping[str, Any], settings: ServerSettings) -> None:
        from ray import serve

        self._ray, self._serve, self._name = ray, serve, name
        deployment = serve.deployment(
            Replica,
            name=DEPLOYMENT,
            num_replicas=cluster.replicas,
            ray_actor_options=actor_options(arguments),
            max_ongoing_requests=arguments["max_num_seqs"] + settings.max_queue + _MORE_THAN_SAMPLES,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=settings.drain_s,
            logging_config={"enable_access_log": False},
            request_router_config={"request_router_class": ROUTER, "request_router_kwargs": {"max_lead": cluster.max_lead}},
        )
        with library_errors("the replicas could not be started: their logs, and those of Ray, say why", CapacityError):
            serve.start(proxy_location="Disabled")  # the front is the one way in
            bound = deployment.bind(dict(arguments), replica_settings(settings))
            self._handle = serve.run(bound, name=name, route_prefix=None)
        self._num_running, self._checked_s = cluster.replicas, float("-inf")
        self._is_closed = False

    def described(self) -> dict[str, Any]:
        """What a replica says of itself."""
        found: dict[str, Any] = self._handle.described.remote().result()
        return found

    async def ask(self, question: Question) -> AsyncGenerator[Head | bytes, None]:
        exceptions = self._ray.exceptions
        more = {name: getattr(question, name) for name in ("query", "headers", "request_id", "key", "replica")}
        parts = self._handle.options(stream=True).ask.remote(question.method, question.path, question.body, **more)
        is_whole = False
        try:
            async for part in parts:
                yield part
            is_whole = True
        except (exceptions.RayActorError, exceptions.NodeDiedError) as error:
            raise ReplicaLostError from error
        finally:
            if not is_whole:
                parts.cancel()

    async def num_running(self) -> int:
        if time.monotonic() > self._checked_s + _STATUS_S:
            self._checked_s = time.monotonic()
            self._num_running = await asyncio.to_thread(self._count)
        return self._num_running

    async def names(self) -> list[str]:
        listed = await asyncio.to_thread(self._ray.util.list_named_actors, all_namespaces=True)
        begin = f"SERVE_REPLICA::{self._name}#{DEPLOYMENT}#"
        return sorted(one["name"].removeprefix(begin) for one in listed if one["name"].startswith(begin))

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._serve.delete, self._name)

    def _count(self) -> int:
        application = self._serve.status().applications.get(self._name)
        states = application.deployments[DEPLOYMENT].replica_states if application is not None else {}
        return int(states.get("RUNNING", 0))
