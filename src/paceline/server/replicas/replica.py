"""One engine among several: the application of a server, asked by a front instead of through a socket."""

import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from paceline.engine.async_engine import AsyncEngine
from paceline.server.app import create_app
from paceline.server.in_process import asked
from paceline.server.settings import ServerSettings


class Replica:
    """An engine and its application.

    Args:
        arguments: of `AsyncEngine.open`.
        settings: limits of the application.
    """

    def __init__(self, arguments: Mapping[str, Any], settings: ServerSettings) -> None:
        self._engine = AsyncEngine.open(**arguments)
        self._app = create_app(self._engine, settings)

    async def ask(
        self, method: str, path: str, body: bytes, **_: object
    ) -> AsyncGenerator[tuple[int, list[tuple[bytes, bytes]]] | bytes, None]:
        """The answer to one request: status and headers, then its body as it comes.

        Further arguments are for whoever chooses the replica.
        """
        async with asked(self._app, method, path, body) as answer:
            yield answer.status, answer.headers
            async for part in answer.parts:
                yield part

    async def check_health(self) -> None:
        """Raises what the engine's thread ended with, if it has."""
        self._engine.check_open()

    async def described(self) -> dict[str, Any]:
        """What a front says of its replicas."""
        opened = self._engine.opened
        return {
            "model": self._app.state.service.model,
            "banner": opened.banner,
            "notices": list(opened.notices),
            "max_num_seqs": opened.engine.scheduler.limits.max_num_seqs,
            "process": os.getpid(),
        }


def replica_settings(settings: ServerSettings) -> ServerSettings:
    """Limits for a replica: who may ask was checked at the front, whose keys no replica needs to know."""
    return replace(settings, host="127.0.0.1", port=0, api_keys=(), allowed_hosts=(), insecure=False)
