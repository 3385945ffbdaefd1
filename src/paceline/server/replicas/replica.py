"""A replica: one engine with the application of a server, called by a front instead of through a socket."""

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from paceline.engine.async_engine import AsyncEngine
from paceline.server.app import create_app
from paceline.server.asgi_client import ForwardedRequest, batched_parts, call_app
from paceline.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers of a response.

    Attributes:
        body: the whole body, or its beginning if the rest is streamed.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        return any(
            name.lower() == b"content-type" and value.startswith((b"text/event-stream", b"application/x-ndjson"))
            for name, value in self.headers
        )


class ReplicaLostError(Exception):
    """The replica of a request ended before it had answered."""


class ReplicaPool(ABC):
    """Replicas that requests can be forwarded to."""

    @abstractmethod
    def forward(self, forwarded: ForwardedRequest) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the head of a replica's response, then its body as it arrives. Closing the generator cancels the request.

        Raises:
            ReplicaLostError: the replica ended.
        """

    @abstractmethod
    async def num_running(self) -> int:
        """Return how many replicas run."""

    @abstractmethod
    async def names(self) -> list[str]:
        """Return the names of the replicas, for `ForwardedRequest.replica`."""

    @abstractmethod
    async def close(self) -> None:
        """End all replicas."""


WINDOW_S = 0.02
"""Between two parts of a stream: each costs the front more time than the tokens in it."""


class Replica:
    """An engine and its application.

    Args:
        arguments: of `AsyncEngine.open`.
        settings: limits of the application.
    """

    def __init__(self, arguments: Mapping[str, Any], settings: ServerSettings) -> None:
        self._engine = AsyncEngine.open(**arguments)
        self._app = create_app(self._engine, settings)

    async def forward(self, forwarded: ForwardedRequest, **_: object) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yield the head of a response with its whole body, or with the parts of a stream after it.

        Further arguments are for the router.
        """
        async with call_app(self._app, forwarded) as answer:
            head = ResponseHead(answer.status, answer.headers)
            if not head.is_stream:
                yield replace(head, body=await answer.body())
                return
            yield head
            async with aclosing(batched_parts(answer.parts, WINDOW_S)) as parts:
                async for part in parts:
                    yield part

    async def check_health(self) -> None:
        """Raise the error that ended the engine's thread, if there is one."""
        self._engine.check_open()

    async def describe(self) -> dict[str, Any]:
        """Return facts about the model for the front."""
        opened = self._engine.loaded
        return {
            "model": self._app.state.service.model,
            "banner": opened.banner,
            "notices": list(opened.notices),
            "max_num_seqs": opened.engine.scheduler.limits.max_num_seqs,
            "process": os.getpid(),
        }


def replica_settings(settings: ServerSettings) -> ServerSettings:
    """Return the settings of a replica: keys and hosts are checked by the front."""
    return replace(settings, host="127.0.0.1", port=0, api_keys=(), allowed_hosts=(), allow_origin=(), insecure=False)
