"""Answering a batch file with several engines, which Ray Data feeds and restarts (extra `ray`)."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import CapacityError, convert_library_errors
from paceline.server.app import create_app
from paceline.server.batch.input_file import BatchLine, Plan
from paceline.server.batch.output_file import OutputFile
from paceline.server.batch.run import BatchResult, Watcher, answer_line, batch_settings, begin_batch
from paceline.server.replicas.ray_serve import actor_options, ray_cluster
from paceline.server.replicas.settings import ClusterSettings
from paceline.server.settings import ServerSettings

_MIN_BLOCKS_PER_REPLICA = 4  # at least: with fewer, one is idle while another has much left
_LINES_PER_SAMPLE = 8  # a block has at most this many lines times `max_num_seqs`


class BatchReplica:
    """An engine that answers blocks of lines.

    Args:
        arguments: of `AsyncEngine.open`.
    """

    def __init__(self, arguments: Mapping[str, Any], settings: ServerSettings) -> None:
        self._app = create_app(AsyncEngine.open(**arguments), batch_settings(settings))

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the output lines of a block of requests as JSON. A block has a column for each field of `BatchLine`."""
        columns = (block[name] for name in ("number", "custom_id", "url", "body"))
        lines = [BatchLine(int(number), name, url, body.encode()) for number, name, url, body in zip(*columns, strict=True)]
        return {"line": asyncio.run(self._answers(lines))}

    async def _answers(self, lines: list[BatchLine]) -> list[str]:
        return [json.dumps(answer) for answer in await asyncio.gather(*(answer_line(self._app, line) for line in lines))]


def run_batch_on_replicas(
    arguments: Mapping[str, Any],
    settings: ServerSettings,
    cluster: ClusterSettings,
    source: Path,
    target: Path,
    watcher: Watcher,
    *,
    debug: bool = False,
) -> BatchResult:
    """Do as `run_batch` with the engines of a Ray cluster. This process writes the output, block by block.

    Raises:
        PacelineError: as for `run_batch`, or Ray is not there.
    """
    arguments = cluster.engine_arguments(arguments)
    with OutputFile(target) as output:
        plan = begin_batch(arguments, settings, source, output, watcher)
        if plan.num_pending:
            with ray_cluster(cluster, arguments, part="data", debug=debug) as ray:
                for line in _answered(ray, arguments, settings, cluster, plan):
                    output.append(line)
                    watcher.advance()
        return BatchResult(plan.num_requests, output.finished.num_by_status, plan.bad)


def lines_per_block(num_lines: int, num_replicas: int, max_num_seqs: int) -> int:
    """Return the lines of a block: large blocks keep a replica busy, small ones balance the load and lose less when it ends."""
    return max(1, min(num_lines // (_MIN_BLOCKS_PER_REPLICA * num_replicas), _LINES_PER_SAMPLE * max_num_seqs))


def _answered(
    ray: Any, arguments: Mapping[str, Any], settings: ServerSettings, cluster: ClusterSettings, plan: Plan
) -> Iterator[dict[str, Any]]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = [{"number": one.number, "custom_id": one.custom_id, "url": one.url, "body": one.body.decode()} for one in plan.lines()]
    num_blocks = -(-len(rows) // lines_per_block(len(rows), cluster.replicas, arguments["max_num_seqs"]))
    answers = ray.data.from_items(rows, override_num_blocks=num_blocks).map_batches(
        BatchReplica,
        fn_constructor_args=(dict(arguments), settings),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=cluster.replicas),
        **actor_options(arguments),
    )
    with convert_library_errors("the replicas failed: run the same command again to continue", CapacityError):
        for row in answers.iter_rows():
            yield json.loads(row["line"])
