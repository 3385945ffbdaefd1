"""What HTTP costs: tokens a second and time to the first token through a server's socket, beside the same engine in process.

    python tools/bench_server.py --model mini --batches 1 8
    python tools/bench_server.py --random DIR/llama1b --quantization int8 --max-tokens 24 --rounds 7

One process serves; both ways take turns with it, request by request: its own engine is asked by a client in the same process, then the
same requests come over a socket from a process of their own, which reads streams and times them. Medians over rounds; texts are compared.
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_machine import REPOSITORY, describe_machine, markdown_table
from bench_models import Shape, write_llama

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from paceline.engine.async_engine import AsyncEngine  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.server.app import create_app  # noqa: E402
from paceline.server.run import Server, listening_socket  # noqa: E402
from paceline.server.settings import ServerSettings  # noqa: E402

HEAD = ["requests", "tokens/s in process", "over HTTP", "ratio", "first token ms in process", "over HTTP, more ms"]
HEAD += ["loop's µs of processor a token in process", "over HTTP"]
SHAPE = Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=32_000)  # 1.04 B
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
PROMPTS = [f"Number {place}: the old fisherman went down to the sea and" for place in range(64)]


@dataclass(frozen=True, slots=True)
class Run:
    """A batch of requests that were asked together.

    Attributes:
        first_s: until each had its first token, the mean.
        call_s: until all had their last.
    """

    texts: list[str]
    num_tokens: int
    call_s: float
    first_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.call_s


async def in_process(engine: AsyncEngine, batch: int, max_tokens: int) -> Run:
    """Ask the engine itself."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    async def one(prompt: str) -> tuple[str, int, float]:
        text, count, first_s, start_s = "", 0, 0.0, time.perf_counter()
        async for chunk in engine.stream(prompt, params):
            text += chunk.text
            if not count:
                first_s = time.perf_counter() - start_s
            count += len(chunk.token_ids)
        return text, count, first_s

    return await _timed(one, batch)


async def over_http(port: int, batch: int, max_tokens: int) -> Run:
    """Ask the server; the client does as little as it can."""
    fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}

    async def one(prompt: str) -> tuple[str, int, float]:
        body = json.dumps({**fields, "prompt": prompt}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        start_s = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        read, first_s = b"", 0.0
        while part := await reader.read(1 << 16):
            read += part
            if not first_s and b"data: " in read:
                first_s = time.perf_counter() - start_s
        writer.close()
        events = [json.loads(line[6:]) for line in read.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        return text, events[-1]["usage"]["completion_tokens"], first_s

    return await _timed(one, batch)


async def _timed(one: Any, batch: int) -> Run:
    start_s = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in PROMPTS[:batch]))
    call_s = time.perf_counter() - start_s
    first_s = statistics.mean(first for _, _, first in answers)
    return Run([text for text, _, _ in answers], sum(count for _, count, _ in answers), call_s, first_s)


def client(pipe: Connection, port: int) -> None:
    """The process that asks over the socket."""
    while (asked := pipe.recv()) is not None:
        pipe.send(asyncio.run(over_http(port, *asked)))


def measure(engine: AsyncEngine, server: int, pipe: Connection, batches: Sequence[int], max_tokens: int, rounds: int) -> list[list[object]]:
    """A row for each batch.

    Args:
        server: the thread with the server's event loop.
    """
    rows: list[list[object]] = []
    for batch in batches:
        runs: dict[bool, list[Run]] = {False: [], True: []}  # by whether it was over HTTP
        busy_s: dict[bool, list[float]] = {False: [], True: []}
        for number in range(rounds + 1):
            for is_served in (number % 2 == 0, number % 2 == 1):
                clock = time.pthread_getcpuclockid(server if is_served else threading.get_ident())
                start_s = time.clock_gettime(clock)
                if is_served:
                    pipe.send((batch, max_tokens))
                    runs[True].append(pipe.recv())
                else:
                    runs[False].append(asyncio.run(in_process(engine, batch, max_tokens)))
                busy_s[is_served].append(time.clock_gettime(clock) - start_s)
        direct, served = runs[False], runs[True]
        if any(run.texts != direct[0].texts for run in (*direct, *served)):
            raise SystemExit(f"texts of batch {batch} differ")
        direct, served = direct[1:], served[1:]  # the first round warms the cache
        ratio = statistics.median(two.tokens_per_s / one.tokens_per_s for one, two in zip(direct, served, strict=True))
        more_ms = 1000 * statistics.median(two.first_s - one.first_s for one, two in zip(direct, served, strict=True))
        speeds = [f"{statistics.median(run.tokens_per_s for run in found):.1f}" for found in (direct, served)]
        loops = [f"{1e6 * statistics.median(busy_s[is_served][1:]) / direct[0].num_tokens:.0f}" for is_served in (False, True)]
        first_ms = 1000 * statistics.median(run.first_s for run in direct)
        rows.append([batch, *speeds, f"{ratio:.3f}", f"{first_ms:.1f}", f"{more_ms:+.1f}", *loops])
    return rows


def random_model(directory: Path) -> str:
    """A random checkpoint with the mini's tokenizer, written unless it is there."""
    if not (directory / TOKENIZER[0]).is_file():
        write_llama(directory, SHAPE)
        for name in TOKENIZER:
            shutil.copy(REPOSITORY / "src/paceline/assets/mini/target" / name, directory)
    return str(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--random", type=Path, help="where a random 1.04 B checkpoint is, or is to be written; in place of --model")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    settings = ServerSettings(port=0)
    options = {"quantization": given.quantization, "drafter": given.drafter, "threads": given.threads, "max_num_seqs": max(given.batches)}
    with listening_socket(settings) as listening:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        asking = multiprocessing.get_context("spawn").Process(target=client, args=(theirs, listening.getsockname()[1]), daemon=True)
        asking.start()
        engine = AsyncEngine.open(given.model if given.random is None else random_model(given.random), **options)
        app = create_app(engine, settings)
        server = Server(app, app.state.service, listening, lambda _: None)
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        assert thread.ident is not None
        rows = measure(engine, thread.ident, ours, given.batches, given.max_tokens, given.rounds)
        ours.send(None)
        server.should_exit = True
        thread.join()
        asyncio.run(engine.close())
    print(describe_machine())
    print(markdown_table(HEAD, rows))


if __name__ == "__main__":
    main()
