"""Settings of replicas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.machine import usable_processors
from paceline.server.replicas.routing import DEFAULT_MAX_LEAD

MAX_COUNT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """How many engines run, and where.

    Attributes:
        replicas: engines, each in its own process; 0 = one in this process, without Ray.
        ray_address: of a running cluster; None = start one on this machine, which ends with the command.
        max_lead: requests that the replica of a prefix may have more than the least loaded one.
    """

    replicas: int = 0
    ray_address: str | None = None
    max_lead: int = DEFAULT_MAX_LEAD

    def __post_init__(self) -> None:
        for name in ("replicas", "max_lead"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise ConfigError(f"{name} is {value!r}: use a whole number from 0 to {MAX_COUNT}")

    def engine_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `AsyncEngine.open` for a replica; ConfigError if a cluster has no `threads`."""
        if arguments.get("threads") is not None:
            return dict(arguments)
        if self.ray_address is not None:
            raise ConfigError("threads is not set: a Ray cluster needs it to place replicas; give --threads")
        return {**arguments, "threads": max(1, usable_processors() // self.replicas)}
