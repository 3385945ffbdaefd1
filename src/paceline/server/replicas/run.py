"""A process that serves several replicas: the front here, engines wherever Ray puts them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from paceline.server.app import served_name
from paceline.server.replicas.front import create_front
from paceline.server.replicas.ray_cluster import ray_cluster
from paceline.server.replicas.ray_pool import RayPool
from paceline.server.replicas.settings import ClusterSettings
from paceline.server.run import Say, listening_socket, serve_application
from paceline.server.settings import ServerSettings
from paceline.server.shutdown_watchdog import ShutdownWatchdog


def run_replicas(
    arguments: Mapping[str, Any], settings: ServerSettings, cluster: ClusterSettings, *, say: Say, quiet: bool = False, debug: bool = False
) -> None:
    """Start replicas and answer with them until a signal ends the process.

    Args:
        arguments: of `AsyncEngine.open`, for each replica.
        say, quiet: as for `server.run.run`.
        debug: whether what replicas write is shown.

    Raises:
        PacelineError: the address cannot be listened on, Ray is not there, or the replicas cannot be started.
    """
    arguments = cluster.engine_arguments(arguments)
    with listening_socket(settings) as listening, ray_cluster(cluster, arguments, part="serve", debug=debug) as ray:
        model = settings.served_name or served_name(arguments["model"])
        pool = RayPool(ray, f"paceline-{model.replace('#', '_')}", cluster, arguments, settings)
        try:
            described = pool.described()
            for notice in described["notices"]:
                say(notice)
            if not quiet:
                say(f"{cluster.replicas} replicas; {described['banner']}")
            app = create_front(pool, settings, described["model"], cluster.replicas * described["max_num_seqs"])
            with ShutdownWatchdog() as watchdog:  # what Ray takes to end is Ray's
                serve_application(app, app.state.service, listening, watchdog, quiet=quiet)
        finally:
            asyncio.run(pool.close())
