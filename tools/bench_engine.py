"""What the engine brings: tokens a second by batch size, plain and with drafters of known accuracy, on a large checkpoint.

    python tools/bench_engine.py CHECKPOINT --quant int8
    python tools/bench_engine.py CHECKPOINT --batches 8 16 --cases plain wrong --max-tokens 192

Whatever is compared takes turns step by step in one process; medians over rounds are reported. Token ids of every run, whatever its batch
and drafter, are compared with those of one plain run.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench_machine import REPOSITORY, describe_machine, markdown_table

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from paceline.engine.engine import Engine  # noqa: E402
from paceline.llm import LLM  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.speculation.draft_length import DraftLengthPolicy  # noqa: E402
from paceline.speculation.drafter import Drafter  # noqa: E402
from paceline.speculation.request import Request  # noqa: E402
from paceline.speculation.speculator import Speculator  # noqa: E402
from paceline.speculation.stats import PlainReason, SpeculationStats  # noqa: E402

SEED = 7
DRAFT_TOKENS = 4
PROMPT_TOKENS = 64
CASES = ("plain", "oracle", "wrong")

Prompts = Sequence[Sequence[int]]
Answers = dict[tuple[tuple[int, ...], int], list[int]]
Key = tuple[int, str]  # batch, case
Runs = Mapping[Key, Sequence["Run"]]


@dataclass(slots=True)
class Run:
    """One batch of requests.

    Attributes:
        call_s: time of all its steps.
        full_tokens, full_s: of the steps in which all requests decoded: each had a token before, and none ended.
    """

    call_s: float = 0.0
    full_tokens: int = 0
    full_s: float = 0.0
    token_ids: list[list[int]] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch while it was full."""
        return self.full_tokens / self.full_s

    @property
    def call_tokens_per_s(self) -> float:
        """Of the whole call: prompts and the time with few requests left count too."""
        return sum(map(len, self.token_ids)) / self.call_s

    def advance(self, requests: Sequence[Request], steps: Iterator[None]) -> bool:
        """Take one step; True when there was none left."""
        num_tokens = sum(request.num_output_tokens for request in requests)
        is_full = all(request.num_output_tokens for request in requests)
        start = time.perf_counter()
        is_over = next(steps, steps) is steps
        elapsed = time.perf_counter() - start
        self.call_s += elapsed
        if is_full and not any(request.is_finished for request in requests):
            self.full_s += elapsed
            self.full_tokens += sum(request.num_output_tokens for request in requests) - num_tokens
        return is_over

    def finish(self, requests: Sequence[Request]) -> None:
        self.token_ids = [list(request.output_token_ids) for request in requests]
        for request in requests:
            self.stats.add(request.stats)


def random_prompts(llm: LLM, count: int) -> list[list[int]]:
    random = np.random.default_rng(SEED)
    return [[int(token) for token in random.integers(10, llm.vocab_size, PROMPT_TOKENS)] for _ in range(count)]


def make_requests(llm: LLM, prompts: Prompts, params: SamplingParams) -> list[Request]:
    return llm._opened.requests([list(prompt) for prompt in prompts], params, {}, is_streamed=False)


def oracle(answers: Answers, vocab_size: int, accuracy: float) -> Drafter:
    """A drafter each of whose guesses is right with a known probability."""
    made = importlib.import_module("harness.adversaries").OracleDrafter(answers, accuracy=accuracy, vocab_size=vocab_size, seed=SEED)
    return cast(Drafter, made)


def wrong(answers: Answers, vocab_size: int) -> Drafter:
    """A drafter that never is right."""
    return cast(Drafter, importlib.import_module("harness.adversaries").WrongDrafter(answers, vocab_size))


def speculator_of(llm: LLM, drafter: Drafter | None, policy: DraftLengthPolicy) -> Speculator:
    return Speculator(drafter, policy, vocab_size=llm.vocab_size, layout=llm.engine.cache.layout)


def run_in_turns(llm: LLM, speculators: Mapping[Key, Speculator], prompts: Prompts, params: SamplingParams) -> dict[Key, Run]:
    """Run batches as `LLM.generate` does, each in an engine of its own on the same target and cache; they take turns step by step.

    So whatever else the machine does hits all of them alike.
    """
    running: dict[Key, tuple[Run, list[Request], Generator[None, None, None]]] = {}
    for key, speculator in speculators.items():
        requests = make_requests(llm, prompts[: key[0]], params)
        engine = Engine(llm.runtime, llm.engine.cache, speculator, llm.engine.scheduler.limits)
        running[key] = Run(), requests, engine.run(requests)
    done: dict[Key, Run] = {}
    while running:
        for key, (run, requests, steps) in list(running.items()):
            if run.advance(requests, steps):
                run.finish(requests)
                done[key] = running.pop(key)[0]
    return {key: done[key] for key in speculators}


def bench_throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of batches, plain, with a drafter that is often right, and with one that never is."""
    vocab_size = json.loads((options.checkpoint / "config.json").read_text())["vocab_size"]
    if not (options.checkpoint / "tokenizer.json").is_file():
        importlib.import_module("harness.checkpoints").write_tokenizer(options.checkpoint, vocab_size)
    answers: Answers = {}
    drafters = {"oracle": oracle(answers, vocab_size, options.accuracy), "wrong": wrong(answers, vocab_size)}
    llm = LLM(
        str(options.checkpoint), drafter=drafters["oracle"], num_draft_tokens=DRAFT_TOKENS, quant=options.quant, backend=options.backend,
        threads=options.threads, max_context=1024, max_num_seqs=max(options.batches),
    )  # fmt: skip
    print("".join(f"- {notice}\n" for notice in llm.notices) + f"{llm.numerics}, {type(llm.runtime).__name__}")
    policy, prompts = llm.engine.speculator.policy, random_prompts(llm, max(options.batches))
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=SEED, temperature=options.temperature)
    first = (max(options.batches), "plain")
    plain = run_in_turns(llm, {first: speculator_of(llm, None, policy)}, prompts, params)[first]
    answers |= {(tuple(prompt), SEED): ids for prompt, ids in zip(prompts, plain.token_ids, strict=True)}
    keys = [(batch, case) for batch in options.batches for case in options.cases]
    runs: dict[Key, list[Run]] = {key: [] for key in keys}
    for number in range(options.repeats):
        # Nothing is known of the drafter at the start of a round.
        speculators = {key: speculator_of(llm, drafters.get(key[1]), deepcopy(policy)) for key in keys}
        for key, run in run_in_turns(llm, speculators, prompts, params).items():
            runs[key].append(run)
        print(f"round {number + 1} of {options.repeats} done", file=sys.stderr)
    compared, different = _compare(runs, prompts, answers)
    head = ["batch", "drafter", "tokens/s (slowest to fastest)", "× plain", "× batch 1 plain"]
    head += ["of the call", "× plain", "tokens a step", "guarded steps"]
    rows = [_row(key, runs) for key in runs]
    print(f"\n{options.max_tokens} tokens a request, {options.repeats} rounds, {DRAFT_TOKENS} draft tokens, accuracy {options.accuracy}\n")
    print(markdown_table(head, rows))
    print(f"\n{compared} token ids of {sum(map(len, runs.values()))} runs compared with one plain run's: {different} requests differ")
    speeds = {f"{batch} {case}": [run.tokens_per_s for run in own] for (batch, case), own in runs.items()}
    return {"rows": [head, *rows], "tokens_per_s": speeds, "compared": compared, "different": different}


def _compare(runs: Runs, prompts: Prompts, answers: Answers) -> tuple[int, int]:
    """Token ids compared with the answers, and requests with another one."""
    compared = different = 0
    for own in runs.values():
        for run in own:
            for prompt, ids in zip(prompts, run.token_ids, strict=False):
                compared += len(ids)
                different += ids != answers[tuple(prompt), SEED]
    return compared, different


def _row(key: Key, runs: Runs) -> list[str]:
    """Ratios are medians over rounds of ratios within a round."""
    batch, case = key
    own, plain, single = runs[key], runs[batch, "plain"], runs.get((1, "plain"), ())
    full, whole = [run.tokens_per_s for run in own], [run.call_tokens_per_s for run in own]
    stats = SpeculationStats()
    for run in own:
        stats.add(run.stats)
    row = [str(batch), case, f"{statistics.median(full):.1f} ({min(full):.1f} to {max(full):.1f})"]
    row += [f"{_ratio(full, [run.tokens_per_s for run in plain]):.3f}"]
    row += [f"{_ratio(full, [run.tokens_per_s for run in single]):.2f}" if single else ""]
    row += [f"{statistics.median(whole):.1f}", f"{_ratio(whole, [run.call_tokens_per_s for run in plain]):.3f}"]
    return [*row, f"{stats.mean_acceptance_length:.2f}", f"{stats.plain[PlainReason.GUARD] / max(1, stats.steps):.0%}"]


def _ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(mine, others, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a directory; gets a word-level tokenizer if it has none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--quant", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--backend", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--accuracy", type=float, default=0.7, help="of the drafter that is often right")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    options = parser.parse_args()
    if "plain" not in options.cases:
        parser.error("every case is compared with plain decoding: add it to --cases")
    return options


def main() -> None:
    options = _options()
    machine = describe_machine()
    print(f"machine: {json.dumps(machine)}")
    result = {"machine": machine, "throughput": bench_throughput(options)}
    print(f"\nload average afterwards: {describe_machine()['load_average']}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
