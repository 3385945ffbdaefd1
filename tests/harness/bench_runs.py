"""Runs of the benchmark with workers of programs that do not exist."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.benchmarking.modes import PLAIN, Mode
from paceline.benchmarking.plan import BenchPlan
from paceline.benchmarking.requests import EncodedPrompt, EncodedWorkloads
from paceline.benchmarking.run import Measurements, Run, RunProgress
from paceline.tokenizer.tokenizer import Tokenizer

WORKER = Path(__file__).with_name("bench_workers.py")
PROMPTS = [EncodedPrompt((3, 1, 4)), EncodedPrompt((1, 5, 9))]


def fake_mode(name: str, *words: str, program: str = "paceline", baseline: str = PLAIN) -> Mode:
    """A mode whose worker behaves as the given words describe."""
    return Mode(name, program, (sys.executable, str(WORKER), f"name={name}", *words), {"model": "none"}, baseline)


def run_of(
    modes: Sequence[Mode],
    *,
    plan: BenchPlan | None = None,
    prompts: dict[str, list[EncodedPrompt]] | None = None,
    watcher: RunProgress | None = None,
    tokenizer: Tokenizer | None = None,
) -> Run:
    """A run that has not begun; small unless the plan differs."""
    plan = plan or BenchPlan(rounds=3, max_tokens=33, num_prompts=2, minutes=5, timeout_s=30, load_timeout_s=30)
    questions = EncodedWorkloads(prompts or {"made up": PROMPTS}, (), 4096, 1024)
    return Run(plan, modes, questions, tokenizer or Tokenizer.__new__(Tokenizer), watcher or RunProgress(), time.monotonic())


def measured(modes: Sequence[Mode], **options: object) -> Measurements:
    """What a run brings."""
    return run_of(modes, **options).measure()  # type: ignore[arg-type]
