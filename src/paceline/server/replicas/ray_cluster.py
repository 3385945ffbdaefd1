"""Joining a Ray cluster, or starting one on this machine alone. Needs Ray (extra `ray`), which is imported here first."""

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from paceline.errors import BackendUnavailableError, library_errors
from paceline.installation import install_extra
from paceline.server.replicas.settings import ClusterSettings

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would tell its makers that it was started
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what it will do soon; else it warns
}


def actor_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What Ray reserves for one replica."""
    return {"num_cpus": arguments["threads"], "num_gpus": 1 if arguments.get("device") == "cuda" else 0}


@contextmanager
def ray_cluster(settings: ClusterSettings, arguments: Mapping[str, Any], *, part: str, debug: bool = False) -> Iterator[Any]:
    """The module `ray`, connected; left at the end.

    Args:
        part: of Ray that is used, "serve" or "data".
        debug: whether what Ray and its processes write is shown.

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
        raise BackendUnavailableError(f"several replicas need {error.name}: {install_extra('ray')}") from error
    own: dict[str, Any] = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
    own |= {"num_cpus": max(1, settings.replicas * int(arguments["threads"]))}
    where = own if settings.ray_address is None else {"address": settings.ray_address}
    with library_errors(f"Ray cannot be reached at {settings.ray_address or 'this machine'}", BackendUnavailableError):
        ray.init(**where, namespace="paceline", log_to_driver=debug, logging_level="INFO" if debug else "ERROR")
    if not debug:
        logging.getLogger("ray").setLevel(logging.WARNING)
        logging.getLogger(f"ray.{part}").setLevel(logging.ERROR)
    try:
        yield ray
    finally:
        ray.shutdown()
