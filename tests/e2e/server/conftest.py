"""A server application with the mini; no resources are left after its tests."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.server.app import create_app
from paceline.server.settings import ServerSettings


@pytest.fixture(scope="package")
def engine() -> Iterator[AsyncEngine]:
    yield from _loaded()


@pytest.fixture(scope="package")
def short_engine() -> Iterator[AsyncEngine]:
    """One for answers that take all of the context: of 2,048 tokens each takes seconds."""
    yield from _loaded(max_model_len=128)


def _loaded(**options: Any) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.open("mini", drafter=["prediction", "ngram"], max_num_seqs=8, threads=1, **options)
    yield engine
    asyncio.run(_until_idle(engine))
    cache = engine.loaded.engine.cache
    cache.check_consistency()
    assert cache.pool.num_free == cache.pool.num_blocks
    asyncio.run(engine.close())


async def _until_idle(engine: AsyncEngine) -> None:
    while (stats := await engine.stats()).num_running + stats.num_waiting:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def served(engine: AsyncEngine) -> Callable[..., HttpClient]:
    """A client of an application with the given settings."""
    return lambda headers=None, **settings: HttpClient(create_app(engine, ServerSettings(**settings)), headers)


@pytest.fixture(scope="module")
def client(served: Callable[..., HttpClient]) -> HttpClient:
    return served()


@pytest.fixture(scope="module")
def short_client(short_engine: AsyncEngine) -> HttpClient:
    return HttpClient(create_app(short_engine, ServerSettings()))
