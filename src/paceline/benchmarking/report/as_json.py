"""A result as JSON: where it comes from, every cell, and every raw sample."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.benchmarking.benchmark import BenchResult
from paceline.benchmarking.intervals import CONFIDENCE, RESAMPLES
from paceline.benchmarking.results import MOST_REPEATS
from paceline.benchmarking.samples import REPEAT_LENGTH

SCHEMA = "paceline-bench/1"


def as_dict(result: BenchResult) -> dict[str, Any]:
    """The JSON object of `paceline bench --json`."""
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


def write_json(result: BenchResult, path: Path) -> None:
    """Write it.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(as_dict(result), allow_nan=False) + "\n", encoding="utf-8")


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
        "looping": {"piece_tokens": REPEAT_LENGTH, "above": MOST_REPEATS},
    }
