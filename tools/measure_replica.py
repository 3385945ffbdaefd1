"""What one replica and its front take, for `tools/simulate_replicas.py`: tokens a second, prompt tokens, the front's work.

    python tools/measure_replica.py --out tools/replica_times.json
    python tools/measure_replica.py --front http://127.0.0.1:8000/v1 --process 4711 --out tools/replica_times.json

The first measures an engine in this process. The second asks a front that is running (`paceline serve --replicas`) and adds what its
process took. All seconds are processor time of that one process, whose engine has one thread: what else runs on the machine counts for
little.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_machine import REPOSITORY, describe_machine

sys.path[:0] = [str(REPOSITORY / "src")]

from paceline import AsyncEngine, SamplingParams  # noqa: E402

ROUNDS = 3
NUM_TOKENS = 128
LONG_PROMPT = 1024
CHATS = (
    "I need a taxi to the airport.",
    "I would like to book a table for two in Toronto tonight.",
    "Can you find me a cheap hotel in Paris with free parking, for three nights from Friday on?",
    "What is the weather like in Lisbon in April, and which clothes should I bring?",
    "Is there a train from Cambridge to London that leaves after five in the afternoon?",
    "Thank you, that is all I need today.",
    "Please remind me to call my doctor tomorrow morning at nine.",
    "I want to send fifty dollars to my brother, can you help me with that?",
)


async def measured(model: str, drafter: str, at_once: Sequence[int]) -> dict[str, Any]:
    """Times of one engine."""
    async with AsyncEngine.open(model, drafter=drafter, threads=1, max_num_seqs=max(at_once), enable_prefix_caching=False) as engine:
        input_processor = engine.loaded.input_processor
        greedy = SamplingParams(temperature=0.0, max_tokens=192)
        answers = [(await engine.chat([{"role": "user", "content": text}], greedy))[0] for text in CHATS]
        rates = [await _tokens_per_s(engine, count) for count in at_once]
        ids = (input_processor.tokenizer.encode(" ".join(CHATS)) * LONG_PROMPT)[:LONG_PROMPT]
        prompts = []
        for _ in range(ROUNDS):
            before_s = time.process_time()
            await engine.generate(ids, SamplingParams(max_tokens=1))
            prompts.append(time.process_time() - before_s)
        return {
            "sizes": [[one.usage.prompt_tokens, one.usage.completion_tokens] for one in answers],
            "tokens_per_s": _filled(at_once, rates),
            "prompt_token_s": statistics.median(prompts) / LONG_PROMPT,
            "engine": {"model": model, "drafter": drafter, "threads": 1, "measured_at": list(at_once), **describe_machine()},
        }


async def _tokens_per_s(engine: AsyncEngine, count: int) -> float:
    """Of each of `count` samples that run together, the median of some rounds."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, seed=1, n=count)
    found = []
    for _ in range(ROUNDS):
        before_s = time.process_time()
        await engine.chat([{"role": "user", "content": CHATS[0]}], params)
        found.append(NUM_TOKENS / (time.process_time() - before_s))
    return statistics.median(found)


def _filled(at_once: Sequence[int], rates: Sequence[float]) -> list[float]:
    """The rates for every count up to the largest, those between two that were measured on a line."""
    filled = []
    for count in range(1, max(at_once) + 1):
        high = next(index for index, known in enumerate(at_once) if known >= count)
        low = max(0, high - 1)
        share = 1.0 if at_once[high] == at_once[low] else (count - at_once[low]) / (at_once[high] - at_once[low])
        filled.append(round(rates[low] + share * (rates[high] - rates[low]), 2))
    return filled


def measured_front(url: str, process: int, num_requests: int = 300) -> dict[str, Any]:
    """Processor time of a front's process for a request, and for each part of a streamed answer."""

    def ask(tokens: int) -> None:
        fields = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": tokens > 1, "speculation": {"enabled": False}}
        request = urllib.request.Request(f"{url}/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    def busy_s(tokens: int) -> float:
        before = _processor_s(process)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, [tokens] * num_requests))
        return (_processor_s(process) - before) / num_requests

    busy_s(1)
    whole, streamed = busy_s(1), busy_s(65)
    return {"front_s": round(whole, 6), "front_part_s": round(max(0.0, streamed - whole) / 65, 7)}


def _processor_s(process: int) -> float:
    """What a process has used, in its own name and the system's."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--front", help="its address, /v1 included")
    parser.add_argument("--process", type=int, help="the id of the front's process")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"front_s": 0.0, "front_part_s": 0.0}
    if options.front:
        known |= measured_front(options.front, options.process)
    else:
        known |= asyncio.run(measured(options.model, options.drafter, options.at_once))
    options.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(known))


if __name__ == "__main__":
    main()
