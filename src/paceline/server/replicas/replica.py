"""One engine among several: the application of a server, asked by a front instead of through a socket."""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from paceline.engine.async_engine import AsyncEngine
from paceline.server.app import create_app
from paceline.server.asgi_client import asked, gathered
from paceline.server.replicas.pool import Head
from paceline.server.settings import ServerSettings

WINDOW_S = 0.02
"""Between two parts of a stream that are sent to a front: each costs it more time than the tokens in it."""


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
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        query: bytes = b"",
        headers: Sequence[tuple[bytes, bytes]] = (),
        request_id: str | None = None,
        **_: object,
    ) -> AsyncGenerator[Head | bytes, None]:
        """The answer to one request: its head, with the whole body or, of a stream, with what comes behind it.

        Further arguments are for whoever chooses the replica.
        """
        async with asked(self._app, method, path, body, query=query, headers=headers, request_id=request_id) as answer:
            head = Head(answer.status, answer.headers)
            if not head.is_stream:
                yield replace(head, body=await answer.body())
                return
            yield head
            async with aclosing(gathered(answer.parts, WINDOW_S)) as parts:
                async for part in parts:
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
    return replace(settings, host="127.0.0.1", port=0, api_keys=(), allowed_hosts=(), allow_origin=(), insecure=False)
