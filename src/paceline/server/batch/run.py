"""Answering a batch file with one engine, by calling the application of the server in this process."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import ConfigError, PacelineError
from paceline.server.app import create_app
from paceline.server.asgi_client import ForwardedRequest, call_app
from paceline.server.batch.input_file import BadLine, BatchLine, Plan, plan_batch
from paceline.server.batch.output_file import OutputFile
from paceline.server.model_pool import served_model_name
from paceline.server.settings import ServerSettings

MAX_QUEUE = 100_000
_A_WEEK_S = 604_800.0


class NotAnsweredError(PacelineError):
    """The engine accepts no more requests; another run can continue."""


def batch_settings(settings: ServerSettings) -> ServerSettings:
    """Return settings without limits on queue and time: the batch itself is the queue."""
    return replace(settings, max_queue=MAX_QUEUE, request_timeout_s=_A_WEEK_S)


async def answer_line(app: ASGIApp, line: BatchLine) -> dict[str, Any]:
    """Return the output line of a request; that of a refused one has the server's error.

    Raises:
        NotAnsweredError: the engine is closed or overloaded; another run may answer it.
    """
    async with call_app(app, ForwardedRequest("POST", line.url, line.body)) as answer:
        content = json.loads(await answer.body())
        request_id = answer.header(b"x-request-id")
        status = answer.status
    if status in (429, 503):
        reason = content.get("error", {}).get("message", "no reason was given")
        raise NotAnsweredError(f"line {line.number} was not answered ({reason}): run the same command again")
    response = {"status_code": status, "request_id": request_id, "body": content}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


SYNC_S = 1.0
"""Seconds of answers that a loss of power may cost."""
_LINES_PER_SAMPLE = 2  # lines in progress for each running sample: prompts are prepared while others run


@dataclass(frozen=True, slots=True)
class Watcher:
    """Callbacks of a running batch.

    Attributes:
        print_line: takes notices for the person who started it.
        warn: takes warnings about skipped lines.
        begin: takes the number of requests that are already answered, and of all.
        advance: called after each answer.
    """

    print_line: Callable[[str], None]
    warn: Callable[[str], None]
    begin: Callable[[int, int], None] = lambda num_done, num_requests: None
    advance: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Counts of a batch, including earlier runs.

    Attributes:
        num_by_status: answers by their HTTP status.
        bad: lines that are not requests.
    """

    num_requests: int
    num_by_status: Mapping[int, int]
    bad: list[BadLine] = field(default_factory=list)

    @property
    def num_answered(self) -> int:
        return sum(self.num_by_status.values())

    @property
    def num_refused(self) -> int:
        return sum(count for status, count in self.num_by_status.items() if 400 <= status < 500)

    @property
    def num_failed(self) -> int:
        return sum(count for status, count in self.num_by_status.items() if status >= 500)


def run_batch(arguments: Mapping[str, Any], settings: ServerSettings, source: Path, target: Path, watcher: Watcher) -> BatchResult:
    """Answer every request of a batch file that has no answer in the output.

    Answers are written as they are finished, so their order may differ from the input's. However a run ends, the next one continues.

    Args:
        arguments: of `AsyncEngine.open`.

    Raises:
        PacelineError: a file cannot be used, the model cannot be loaded, or the engine ended.
    """
    with OutputFile(target) as output:
        plan = begin_batch(arguments, settings, source, output, watcher)
        if plan.num_pending:
            asyncio.run(_answer_all(arguments, settings, plan, output, watcher))
        return BatchResult(plan.num_requests, output.finished.num_by_status, plan.bad)


def begin_batch(arguments: Mapping[str, Any], settings: ServerSettings, source: Path, output: OutputFile, watcher: Watcher) -> Plan:
    """Return the requests that are not answered yet, and warn of bad lines.

    Raises:
        RequestError: the batch file cannot be used.
        ConfigError: the answers of the output are another batch's, or come from another model than this one or its adapters.
    """
    plan = plan_batch(source, output.finished, settings.max_body_bytes)
    model = settings.served_model_name or served_model_name(arguments["model"])
    if others := sorted(output.finished.models - {model, *arguments.get("adapters", ())}):
        found = f"{output.path} holds answers of the model {others[0]!r}, and this is {model!r}"
        raise ConfigError(f"{found}: give another output file, or its adapter by that name")
    for bad in plan.bad:
        watcher.warn(f"line {bad.number} is left out: {bad.reason}")
    watcher.begin(plan.num_requests - plan.num_pending, plan.num_requests)
    return plan


async def _answer_all(arguments: Mapping[str, Any], settings: ServerSettings, plan: Plan, output: OutputFile, watcher: Watcher) -> None:
    engine = await asyncio.to_thread(lambda: AsyncEngine.open(**arguments))
    try:
        for notice in (*engine.loaded.notices, engine.loaded.banner):
            watcher.print_line(notice)
        app = create_app(engine, batch_settings(settings))
        num_at_once = _LINES_PER_SAMPLE * engine.loaded.engine.scheduler.limits.max_num_seqs
        await answer_lines(app, plan.lines(), num_at_once, output, watcher.advance)
    finally:
        await engine.close()


async def answer_lines(
    app: ASGIApp, lines: Iterator[BatchLine], num_at_once: int, output: OutputFile, advance: Callable[[], None] = lambda: None
) -> None:
    async def work() -> None:
        for line in lines:  # shared: each is taken by one
            output.append(await answer_line(app, line))
            advance()

    syncing = asyncio.ensure_future(_keep_synced(output))
    working = [asyncio.ensure_future(work()) for _ in range(num_at_once)]
    try:
        await asyncio.gather(*working)
    finally:
        for task in (syncing, *working):
            task.cancel()
        await asyncio.gather(syncing, *working, return_exceptions=True)


async def _keep_synced(output: OutputFile) -> None:
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(output.sync)
