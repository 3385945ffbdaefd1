"""Run a whole benchmark: choose modes and prompts, measure, judge the samples, and write the result as JSON."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from paceline.benchmarking.intervals import CONFIDENCE, RESAMPLES
from paceline.benchmarking.modes import own_modes, peer_modes
from paceline.benchmarking.plan import BenchPlan
from paceline.benchmarking.provenance import ModelFacts, load_average, machine_facts, model_facts
from paceline.benchmarking.requests import encode_workloads, select_workloads
from paceline.benchmarking.results import Cell, Summary, make_cells, summaries
from paceline.benchmarking.run import Measurements, Run, RunProgress, requested_size
from paceline.config import EngineConfig
from paceline.hub import resolve_model
from paceline.models.checkpoint import read_model_config
from paceline.repeats import MAX_REPEAT_SHARE, NGRAM_TOKENS
from paceline.tokenizer.tokenizer import Tokenizer

_READ_BYTES = 256 << 20
"""Larger than any cache."""
_REPEATS = 5
SCHEMA = "paceline-bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that was measured, and under which conditions.

    Attributes:
        command: what was typed.
        date: UTC, when it began.
        seconds: it took.
        bandwidth: bytes a second that this machine reads with as many threads.
        load_before, load_after: load averages.
    """

    plan: BenchPlan
    command: str
    date: str
    seconds: float
    model: ModelFacts
    draft_model: ModelFacts | None
    num_threads: int
    machine: dict[str, Any]
    bandwidth: float
    load_before: tuple[float, float, float] | None
    load_after: tuple[float, float, float] | None
    measured: Measurements
    cells: list[Cell]
    summaries: list[Summary]


def benchmark(plan: BenchPlan, watcher: RunProgress, command: str) -> BenchResult:
    """Measure the modes and workloads of a plan.

    Args:
        command: what was typed, for the report.

    Raises:
        PacelineError: something that was asked for does not exist or cannot work; nothing was measured.
    """
    started_s, date, load_before = time.monotonic(), datetime.now(UTC), load_average()
    workloads = select_workloads(plan)
    target = resolve_model(plan.model, gguf_file=plan.gguf_file, offline=plan.offline)
    config, tokenizer = read_model_config(target), Tokenizer.open(target)
    size, _ = requested_size(plan)
    questions = encode_workloads(plan, workloads, config, tokenizer, (size.prompts, size.tokens))
    facts = model_facts(plan.model, target, plan.quantization)
    modes = own_modes(plan, target, context=questions.context, has_predictions=questions.has_predictions)
    others, draft = peer_modes(plan, target, facts.precision, context=questions.context)
    num_threads = EngineConfig(threads=plan.threads).num_threads
    bandwidth = read_bandwidth(num_threads)
    measured = Run(plan, [*modes, *others], questions, tokenizer, watcher, started_s).measure()
    cells = make_cells(measured, plan.seed)
    return BenchResult(
        plan=plan,
        command=command,
        date=date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=time.monotonic() - started_s,
        model=facts,
        draft_model=None if draft is None else model_facts(plan.draft_model or draft.name, draft, plan.quantization),
        num_threads=num_threads,
        machine=machine_facts(),
        bandwidth=bandwidth,
        load_before=load_before,
        load_after=load_average(),
        measured=measured,
        cells=cells,
        summaries=summaries(cells, measured.modes),
    )


def read_bandwidth(num_threads: int) -> float:
    """Return the memory read bandwidth of `num_threads` threads in bytes per second: an upper bound of a memory-bound pass.

    The best of `_REPEATS`; each thread looks for the largest number of its part.
    """
    memory = np.ones(_READ_BYTES // 8, np.uint64)
    parts = np.array_split(memory, num_threads)
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_REPEATS):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return memory.nbytes / best


def as_dict(result: BenchResult) -> dict[str, Any]:
    """Return the JSON object of `paceline bench --json`."""
    measured = result.measured
    return {
        "schema": SCHEMA,
        "command": result.command,
        "date": result.date,
        "seconds": round(result.seconds, 3),
        "ended": measured.ended,
        "model": result.model.as_dict(),
        "draft_model": None if result.draft_model is None else result.draft_model.as_dict(),
        "settings": _settings(result),
        "machine": {
            **result.machine,
            "threads": result.num_threads,
            "read_bandwidth_bytes_per_s": result.bandwidth,
            "load_average_before": result.load_before,
            "load_average_after": result.load_after,
        },
        "modes": [
            {
                "name": mode.name,
                "program": mode.program,
                "baseline": mode.baseline,
                "order": mode.order,
                "facts": measured.facts.get(mode.name),
            }
            for mode in measured.modes
        ],
        "cells": [cell.as_dict() for cell in result.cells],
        "summaries": [asdict(summary) for summary in result.summaries],
        "failures": [asdict(failure) for failure in measured.failures],
        "notices": measured.notices,
        "samples": [sample.as_dict() for sample in measured.samples],
    }


def json_text(result: BenchResult) -> str:
    return json.dumps(as_dict(result), allow_nan=False)


def _settings(result: BenchResult) -> dict[str, Any]:
    plan, size = result.plan, result.measured.size
    return {
        "rounds": size.rounds,
        "tokens": size.tokens,
        "prompts_per_workload": size.prompts,
        "batch_size": plan.batch_size,
        "temperatures": list(plan.temperatures),
        "minutes": plan.minutes,
        "seed": plan.seed,
        "bootstrap": {"seed": plan.seed, "resamples": RESAMPLES, "confidence": CONFIDENCE},
        "looping": {"piece_tokens": NGRAM_TOKENS, "above": MAX_REPEAT_SHARE},
    }
