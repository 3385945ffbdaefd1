"""Speculation on against off where passes are short: engines with one target and one cache take turns step by step, in random order.

    python tools/bench_turns.py --batches 1 4 16 --temperatures 0 1 --max-tokens 96 --texts 6
    python tools/bench_turns.py --modes plain ngram --batches 4 --profile ngram

Each engine has a drafter and a policy of its own, which go on learning from text to text; plain decoding is there twice, against itself.
A ratio is that of one text, plain over the mode: seconds of the engine's steps from the one in which every request of its batch has its
first token to the one in which it ends.
With one thread seconds of the processor are compared too, which other programs disturb less than the clock, and decisions may go by them
(`--processor-clock`). All tokens must be the same.
"""

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench_machine import REPOSITORY, describe_machine, markdown_table

if "--processor-clock" in sys.argv:  # before anybody takes the other one
    time.perf_counter = time.thread_time
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from paceline.benchmarking.intervals import paired_ratio  # noqa: E402
from paceline.benchmarking.workloads import own_workloads  # noqa: E402
from paceline.drafters.ngram import NgramDrafter  # noqa: E402
from paceline.drafters.prediction import PredictionDrafter  # noqa: E402
from paceline.drafters.suffix import SuffixDrafter  # noqa: E402
from paceline.engine.engine import Engine  # noqa: E402
from paceline.engine.loader import DEFAULT_DRAFT_TOKENS  # noqa: E402
from paceline.llm import LLM  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.speculation.draft_length.explain import explain_policy  # noqa: E402
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength  # noqa: E402
from paceline.speculation.drafter import DraftBudget, Drafter  # noqa: E402
from paceline.speculation.request import Request  # noqa: E402
from paceline.speculation.speculator import Speculator  # noqa: E402
from paceline.speculation.tree import DraftTree  # noqa: E402

SEED = 7
UNLIKELY = 3  # an id that is hardly ever said
KINDS = ("chat", "arithmetic", "random")
MODES = ("plain", "again", "ngram", "suffix", "prediction", "no_prediction", "wrong", "draft_model")


class WrongDrafter(Drafter):
    """Always has a guess, which is always wrong."""

    name = "wrong"

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        sizes = [min(budget.max_depth, budget.row_budget - 1) for budget in budgets]
        return [DraftTree.chain(request.token_ids[-1], [UNLIKELY] * size, self.name) for request, size in zip(requests, sizes, strict=True)]


@dataclass(slots=True)
class Side:
    """One engine, and what its steps took: seconds by the clock and of the processor of each text, steps and emitted tokens, by batch."""

    name: str
    engine: Engine
    requests: list[Request] = field(default_factory=list)
    wall_s: list[list[float]] = field(default_factory=list)
    cpu_s: list[list[float]] = field(default_factory=list)
    spent_s: tuple[float, float] = (0.0, 0.0)
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(request.is_finished for request in self.requests)

    def begin(self, requests: list[Request]) -> None:
        self.requests = requests
        for request in requests:
            self.engine.add(request)
        while not all(request.num_output_tokens for request in requests):
            self.engine.step()
        self.steps.append(0)
        self.spent_s = (0.0, 0.0)
        self.wall_s.append([0.0] * len(requests))
        self.cpu_s.append([0.0] * len(requests))
        self.tokens.append(-sum(request.num_output_tokens for request in requests))

    def step(self, profiler: cProfile.Profile | None) -> None:
        if profiler is not None:
            profiler.enable()
        start, start_cpu = time.monotonic(), time.thread_time()
        self.engine.step()
        self.spent_s = self.spent_s[0] + time.monotonic() - start, self.spent_s[1] + time.thread_time() - start_cpu
        for index, request in enumerate(self.requests):
            if request.is_finished and not self.wall_s[-1][index]:
                self.wall_s[-1][index], self.cpu_s[-1][index] = self.spent_s
        if profiler is not None:
            profiler.disable()
        self.steps[-1] += 1


def make_side(name: str, llm: LLM) -> Side:
    """An engine on the model's target and cache."""
    opened = llm.engine
    known: Any = opened.speculator.policy
    drafters: dict[str, Drafter | None] = {"ngram": NgramDrafter(), "suffix": SuffixDrafter(), "wrong": WrongDrafter()}
    drafters |= {"prediction": PredictionDrafter(), "no_prediction": PredictionDrafter(), "draft_model": llm.drafter}
    drafter, policy = drafters.get(name), FixedDraftLength(DEFAULT_DRAFT_TOKENS)
    if drafter is not None:
        policy = AdaptiveDraftLength(DEFAULT_DRAFT_TOKENS, known.cost.profile)
    speculator = Speculator([] if drafter is None else [drafter], policy, vocab_size=llm.vocab_size, layout=opened.cache.layout)
    return Side(name, Engine(opened.runtime, opened.cache, speculator, opened.scheduler.limits))


def prompts_of(llm: LLM, kind: str, count: int, random: np.random.Generator) -> list[list[int]]:
    """Drawn with replacement; the texts differ by their seeds where they are sampled, and by what precedes them."""
    if kind == "random":
        return [[int(token) for token in random.integers(10, llm.vocab_size, 48)] for _ in range(count)]
    (workload,) = own_workloads((kind,))
    input_processor, found = llm._loaded.input_processor, []
    for _ in range(count):
        prompt = workload.prompts[int(random.integers(len(workload.prompts)))]
        found.append(
            input_processor.chat_ids([dict(one) for one in prompt.messages])
            if prompt.messages
            else input_processor.prompt_ids(prompt.text or "")
        )
    return found


def run_texts(llm: LLM, sides: Sequence[Side], prompts: list[list[int]], params: SamplingParams, options: argparse.Namespace) -> None:
    """One batch of texts on every side, step by step in random order."""
    random = np.random.default_rng(SEED + len(sides[0].steps))
    unrelated = [[int(token) for token in random.integers(10, llm.vocab_size, options.max_tokens)] for _ in prompts]
    for side in sides:
        requests = llm._loaded.requests(prompts, params, {}, is_streamed=False)
        if side.name == "prediction":
            for request, guess in zip(requests, unrelated, strict=True):
                request.prediction_token_ids = guess
        side.begin(requests)
    while waiting := [side for side in sides if not side.is_done]:
        for index in random.permutation(len(waiting)):
            waiting[index].step(options.profiler if waiting[index].name == options.profile else None)
    texts = [[request.token_ids for request in side.requests] for side in sides]
    for side, own in zip(sides, texts, strict=True):
        side.tokens[-1] += sum(request.num_output_tokens for request in side.requests)
        if own != texts[0]:
            raise SystemExit(f"{side.name} wrote other tokens than {sides[0].name}")


def bench_batch(llm: LLM, batch: int, temperature: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each mode and kind of texts, and one for all kinds."""
    sides = [make_side(name, llm) for name in options.modes]
    kinds: list[str] = []
    for index in range(options.warm_up + options.texts):
        for kind in options.kinds:
            prompts = prompts_of(llm, kind, batch, np.random.default_rng((SEED, index, batch, KINDS.index(kind))))
            params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=SEED + index, temperature=temperature)
            run_texts(llm, sides, prompts, params, options)
            kinds.append(kind if index >= options.warm_up else "")
    for side in sides:
        if options.explain and side.engine.speculator.drafters:
            policy, stats = side.engine.speculator.policy, side.engine.stats.speculation
            shares = ", ".join(f"{reason.value} {count / stats.steps:.3f}" for reason, count in stats.skip_counts.items())
            counts = f"drafted {stats.num_draft_tokens}, accepted {stats.num_accepted_tokens} in {stats.steps}"
            print(f"\n{side.name}, batch {batch}, T = {temperature}: {counts}")
            print("\n".join([f"plain: {shares}", *explain_policy(policy)]))
    plain, lines = sides[0], []
    for side in sides[1:]:
        for kind in (*options.kinds, "all"):
            chosen = [index for index, own in enumerate(kinds) if own == kind or (own and kind == "all")]
            lines.append(_line(batch, temperature, kind, plain, side, chosen))
    return lines


def _line(batch: int, temperature: float, kind: str, plain: Side, side: Side, chosen: Sequence[int]) -> dict[str, Any]:
    def ratio(of: str) -> str:
        seconds = [[own for index in chosen for own in getattr(one, of)[index]] for one in (plain, side)]
        found = paired_ratio(*seconds)
        return f"{found.median:.3f}" + ("" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})")

    steps, tokens = sum(side.steps[index] for index in chosen), sum(side.tokens[index] for index in chosen)
    return {
        "batch": batch,
        "T": temperature,
        "texts": kind,
        "mode": side.name,
        "clock": ratio("wall_s"),
        "processor": ratio("cpu_s"),
        "tokens a step": f"{tokens / max(1, steps) / batch:.2f}",
        "ms a step": f"{1e3 * sum(max(side.wall_s[index]) for index in chosen) / max(1, steps):.2f}",
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="the first one is what others are compared with")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--texts", type=int, default=6, help="batches of texts of each kind")
    parser.add_argument("--warm-up", type=int, default=1, help="batches of each kind before them that do not count")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", choices=MODES, help="print where the time of this mode's steps goes")
    parser.add_argument("--lines", type=int, default=40, help="for --profile: functions listed")
    parser.add_argument("--processor-clock", action="store_true", help="decide by seconds of the processor too: on a busy machine")
    parser.add_argument("--explain", action="store_true", help="say what each mode decided by")
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    options = parser.parse_args()
    options.profiler = cProfile.Profile() if options.profile else None
    return options


def main() -> None:
    options = _options()
    machine = describe_machine()
    print(f"machine: {json.dumps(machine)}")
    lines: list[dict[str, Any]] = []
    with LLM(options.model, drafter="draft_model", threads=options.threads, max_num_seqs=max(options.batches)) as llm:
        for batch in options.batches:
            for temperature in options.temperatures:
                own = bench_batch(llm, batch, temperature, options)
                print(f"\n{markdown_table(list(own[0]), [list(line.values()) for line in own])}", flush=True)
                lines += own
    if options.profiler is not None:
        pstats.Stats(options.profiler).sort_stats("tottime").print_stats(options.lines)
    print(f"\nload average afterwards: {describe_machine()['load_average']}")
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "turns": lines}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
