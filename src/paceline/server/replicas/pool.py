"""What a front forwards requests to."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from paceline.server.errors import HttpError

RETRY_S = 2


@dataclass(frozen=True, slots=True)
class Question:
    """A request on its way to a replica.

    Attributes:
        query: behind the path.
        headers: of the client, without those that are about its connection or say who it is.
        request_id: that the front gave it.
        key: of its beginning, for `choose_replica`.
        replica: the one that must answer; None = any.
    """

    method: str
    path: str
    body: bytes = b""
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    request_id: str | None = None
    key: int | None = None
    replica: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer.

    Attributes:
        body: the beginning of it, or all; the rest follows.
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
    """The replica that worked on a request ended before it had answered."""


class ReplicaPool(ABC):
    """Replicas, and who of them is there."""

    @abstractmethod
    def ask(self, question: Question) -> AsyncGenerator[Head | bytes, None]:
        """The answer of one replica: its head, then its body as it comes. Left early, the request is given up.

        Raises:
            ReplicaLostError: the replica ended.
        """

    @abstractmethod
    async def num_running(self) -> int:
        """How many replicas take requests."""

    @abstractmethod
    async def names(self) -> list[str]:
        """Names of the replicas, for `Question.replica`."""

    @abstractmethod
    async def close(self) -> None:
        """End them all."""


def replica_lost() -> HttpError:
    """What a client is told whose replica ended."""
    return _unavailable("the replica that worked on this request ended, and is being restarted: ask again", "replica_lost")


def no_replica() -> HttpError:
    """What a client is told while there is no replica."""
    return _unavailable("no replica is running, they are being started: ask again soon", "no_replica")


def _unavailable(text: str, code: str) -> HttpError:
    return HttpError(503, text, kind="service_unavailable_error", code=code, headers={"Retry-After": str(RETRY_S)})
