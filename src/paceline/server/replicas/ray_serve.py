"""Replicas as a deployment of Ray Serve, which watches and restarts them. Needs Ray (extra `ray`), imported when it is connected."""

import asyncio
import faulthandler
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from paceline.errors import BackendUnavailableError, CapacityError, convert_library_errors
from paceline.installation import install_command
from paceline.server.asgi_client import ForwardedRequest
from paceline.server.model_pool import served_model_name
from paceline.server.replicas.front import create_front
from paceline.server.replicas.replica import Replica, ReplicaLostError, ReplicaPool, ResponseHead, replica_settings
from paceline.server.replicas.settings import ClusterSettings
from paceline.server.run import PrintLine, listening_socket, serve_application
from paceline.server.settings import ServerSettings

DEPLOYMENT = "Replica"
ROUTER = "paceline.server.replicas.ray_router.PrefixRouter"
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
_MORE_THAN_SAMPLES = 64  # for requests that the replica refuses, and requests without samples
_STATUS_S = 1.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # usage statistics are sent to its makers by default
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # its future default; without it Ray warns
}

_TERMINATE_AT_EOF = """
import os, signal, sys
sys.stdin.read()  # ends with the process that holds the other end
for number in map(int, sys.argv[1:]):
    try:
        os.kill(number, signal.SIGTERM)
    except OSError:
        pass
"""


def actor_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of one replica."""
    return {"num_cpus": arguments["threads"], "num_gpus": 1 if arguments.get("device") == "cuda" else 0}


@contextmanager
def ray_cluster(settings: ClusterSettings, arguments: Mapping[str, Any], *, part: str, debug: bool = False) -> Iterator[Any]:
    """Connect to Ray, or start it on this machine; yield the module `ray`.

    Args:
        part: the library of Ray that is used, "serve" or "data".
        debug: whether to show the output of Ray and its processes.

    Raises:
        BackendUnavailableError: Ray is not installed, or the cluster cannot be reached.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if settings.ray_address is None and "RAY_AUTH_MODE" not in os.environ:  # some of its ports listen beyond the loopback
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        import ray

        import_module(f"ray.{part}")
    except ImportError as error:
        raise BackendUnavailableError(f"several replicas need {error.name}: {install_command('ray')}") from error
    own: dict[str, Any] = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
    own |= {"num_cpus": max(1, settings.replicas * int(arguments["threads"]))}
    where = own if settings.ray_address is None else {"address": settings.ray_address}
    with convert_library_errors(f"Ray cannot be reached at {settings.ray_address or 'this machine'}", BackendUnavailableError):
        ray.init(**where, namespace="paceline", log_to_driver=debug, logging_level="INFO" if debug else "ERROR")
    if not debug:
        logging.getLogger("ray").setLevel(logging.WARNING)
        logging.getLogger(f"ray.{part}").setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            if settings.ray_address is None:
                stack.enter_context(_ended_with_this_process())
            yield ray
    finally:
        ray.shutdown()


@contextmanager
def _ended_with_this_process() -> Iterator[None]:
    """Terminate Ray's processes also if this one is killed: its agents outlive the daemon that started them."""
    import psutil  # type: ignore[import-untyped]  # part of Ray

    ids = [str(process.pid) for process in psutil.Process().children(recursive=True)]
    watching = subprocess.Popen([sys.executable, "-c", _TERMINATE_AT_EOF, *ids], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        watching.kill()
        watching.communicate()


class RayPool(ReplicaPool):
    """Engines in separate processes, on one machine or several.

    Args:
        ray: the module, connected.
        name: of the application in the cluster; one with the same name is replaced.
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
        with convert_library_errors("the replicas could not be started: their logs, and those of Ray, say why", CapacityError):
            serve.start(proxy_location="Disabled")  # clients connect to the front
            bound = deployment.bind(dict(arguments), replica_settings(settings))
            self._handle = serve.run(bound, name=name, route_prefix=None)
        self._num_running, self._checked_s = cluster.replicas, float("-inf")
        self._is_closed = False

    def describe(self) -> dict[str, Any]:
        """Return facts about the model from one replica."""
        found: dict[str, Any] = self._handle.describe.remote().result()
        return found

    async def forward(self, forwarded: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        exceptions = self._ray.exceptions
        parts = self._handle.options(stream=True).forward.remote(forwarded, key=forwarded.key, replica=forwarded.replica)
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


def run_replicas(
    arguments: Mapping[str, Any],
    settings: ServerSettings,
    cluster: ClusterSettings,
    *,
    print_line: PrintLine,
    quiet: bool = False,
    debug: bool = False,
) -> None:
    """Start replicas and serve them until a signal ends the process.

    Args:
        arguments: of `AsyncEngine.open`, for each replica.
        print_line, quiet: as for `server.run.run`.
        debug: whether to show the output of replicas.

    Raises:
        PacelineError: the address cannot be listened on, Ray is not there, or the replicas cannot be started.
    """
    arguments = cluster.engine_arguments(arguments)
    with listening_socket(settings) as listening, ray_cluster(cluster, arguments, part="serve", debug=debug) as ray:
        model = settings.served_model_name or served_model_name(arguments["model"])
        pool = RayPool(ray, f"paceline-{model.replace('#', '_')}", cluster, arguments, settings)
        try:
            facts = pool.describe()
            for notice in facts["notices"]:
                print_line(notice)
            if not quiet:
                print_line(f"{cluster.replicas} replicas; {facts['banner']}")
            app = create_front(pool, settings, facts["model"], cluster.replicas * facts["max_num_seqs"])
            serve_application(app, app.state.service, listening, quiet=quiet)
        finally:
            faulthandler.cancel_dump_traceback_later()  # the shutdown of Ray may take longer
            asyncio.run(pool.close())
