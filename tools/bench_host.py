"""Host time of a step, by batch size: its wall time less the kernels' run, and a flame graph of where it goes.

    python tools/bench_host.py --batches 1 16
    python tools/bench_host.py --flame step.svg --sampler PATH/py-spy --batches 16 --sampled

The model's pass is short but its vocabulary is not. Cases take turns in one process; medians over all steps are reported.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np

from bench_machine import REPOSITORY, describe_machine, markdown_table
from draw_flame_graph import draw, read_stacks, table

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from paceline.llm import LLM  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.speculation.draft_length.policy import FixedDraftLength  # noqa: E402
from paceline.speculation.drafter import Drafter  # noqa: E402
from paceline.speculation.request import Request  # noqa: E402
from paceline.speculation.speculator import Speculator  # noqa: E402

SEED = 7
DRAFT_TOKENS = 4
PROMPT_TOKENS = 64
FIRST_TOKENS = 3  # of a request; the steps that bring them are left out
SAMPLES_PER_S = 500
ROOT = "Engine.step ("

Prompts = Sequence[Sequence[int]]
Answers = dict[tuple[tuple[int, ...], int], list[int]]


class TimedCall:
    """A function that remembers how long it has been running."""

    def __init__(self, call: Any, clock: Callable[[], float] = perf_counter) -> None:
        self._call, self._clock = call, clock
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = self._clock()
        result = self._call(*arguments)
        self.seconds += self._clock() - start
        return result


class TimedKernels:
    """The compiled kernels with a clock at the pass."""

    def __init__(self, kernels: Any, clock: Callable[[], float] = perf_counter) -> None:
        self._kernels = kernels
        self.paceline_run = TimedCall(kernels.paceline_run, clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one kind."""

    batch: int
    params: SamplingParams
    drafter: Drafter | None


@contextmanager
def small_model(options: argparse.Namespace, scale: float) -> Iterator[tuple[LLM, TimedCall]]:
    """A model, and the clock of its kernels.

    Args:
        scale: of its weights: the larger, the more its logits differ.
    """
    write_checkpoint = importlib.import_module("harness.checkpoints").write_checkpoint
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), "llama", vocab_size=options.vocab, num_hidden_layers=2, initializer_range=scale)
        llm = LLM(directory, drafter="none", backend="native", threads=options.threads, max_num_seqs=max(options.batches))
        target: Any = llm.runtime
        execution = target._programs[None].execution
        timed = execution.kernels = TimedKernels(execution.kernels)
        yield llm, timed.paceline_run


def random_prompts(llm: LLM, count: int) -> list[list[int]]:
    random = np.random.default_rng(SEED)
    return [[int(token) for token in random.integers(10, llm.vocab_size, PROMPT_TOKENS)] for _ in range(count)]


def make_requests(llm: LLM, prompts: Prompts, params: SamplingParams) -> list[Request]:
    return llm._loaded.requests([list(prompt) for prompt in prompts], params, {}, is_streamed=False)


def oracle(answers: Answers, vocab_size: int, accuracy: float) -> Drafter:
    """A drafter each of whose guesses is right with a known probability."""
    made = importlib.import_module("harness.adversaries").OracleDrafter(answers, accuracy=accuracy, vocab_size=vocab_size, seed=SEED)
    return cast(Drafter, made)


def speculator_of(llm: LLM, drafters: Sequence[Drafter], policy: FixedDraftLength) -> Speculator:
    return Speculator(drafters, policy, vocab_size=llm.vocab_size, layout=llm.engine.cache.layout)


def use(llm: LLM, drafter: Drafter | None) -> None:
    """Draft with another drafter from now on, without a guard."""
    llm.engine.speculator = speculator_of(llm, [] if drafter is None else [drafter], FixedDraftLength(DRAFT_TOKENS))


def make_cases(llm: LLM, options: argparse.Namespace) -> list[Case]:
    """Greedy and top-p 0.9, with and without drafts, for each batch size."""
    prompts = random_prompts(llm, max(options.batches))
    cases = []
    for temperature, top_p in ((0.0, 1.0), (0.7, 0.9)):
        params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=SEED, temperature=temperature, top_p=top_p)
        use(llm, None)
        outputs = llm.generate(prompts, params)
        answers: Answers = {(tuple(prompt), SEED): output.token_ids for prompt, output in zip(prompts, outputs, strict=True)}
        for batch in options.batches:
            cases += [Case(batch, params, None), Case(batch, params, oracle(answers, llm.vocab_size, options.accuracy))]
    return cases


def time_steps(llm: LLM, case: Case, kernels: TimedCall) -> list[tuple[float, float, int]]:
    """(host seconds, kernel seconds, emitted tokens) of each step in which all requests took part and had whole drafts, or none."""
    use(llm, case.drafter)
    requests = make_requests(llm, random_prompts(llm, case.batch), case.params)
    num_drafts = DRAFT_TOKENS * case.batch if case.drafter is not None else 0
    steps: list[tuple[float, float, int]] = []
    with closing(llm.engine.run(requests)) as run:
        while True:
            before, inside_before = _counts(requests), kernels.seconds
            is_steady = all(request.num_output_tokens > FIRST_TOKENS and not request.is_finished for request in requests)
            start = perf_counter()
            if next(run, run) is run:
                return steps
            wall, inside = perf_counter() - start, kernels.seconds - inside_before
            emitted, drafted = (after - one for after, one in zip(_counts(requests), before, strict=True))
            if is_steady and drafted == num_drafts:
                steps.append((wall - inside, inside, emitted))


def _counts(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens emitted and drafted so far."""
    return sum(request.num_output_tokens for request in requests), sum(request.stats.num_draft_tokens for request in requests)


def bench_host(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A table with a line for each kind of step."""
    results = []
    for logits, scale in (("flat", 0.15), ("peaked", 0.6)):
        with small_model(options, scale) as (llm, kernels):
            cases = make_cases(llm, options)
            samples: list[list[tuple[float, float, int]]] = [[] for _ in cases]
            for _ in range(options.repeats):
                for own, case in zip(samples, cases, strict=True):
                    own += time_steps(llm, case, kernels)
        results += [_row(logits, case, own) for own, case in zip(samples, cases, strict=True)]
    print(f"\nhost time a step, V = {options.vocab}: wall time less the kernels' run\n")
    print(markdown_table(list(results[0]), [list(result.values()) for result in results]))
    return results


def _row(logits: str, case: Case, steps: Sequence[tuple[float, float, int]]) -> dict[str, Any]:
    host, inside, emitted = (np.array(part, np.float64) for part in zip(*steps, strict=True))
    median, most = 1e3 * np.median(host), 1e3 * np.quantile(host, 0.9)
    return {
        "logits": logits,
        "batch": case.batch,
        "T": case.params.temperature,
        "drafts": DRAFT_TOKENS if case.drafter is not None else 0,
        "tokens a step": f"{emitted.mean():.2f}",
        "host ms (p90)": f"{median:.3f} ({most:.3f})",
        "host ms a token": f"{median / emitted.mean():.3f}",
        "kernels ms": f"{1e3 * np.median(inside):.3f}",
        "steps": len(steps),
    }


def draw_step(options: argparse.Namespace) -> dict[str, float]:
    """A picture of where a step's time goes, from samples that another process takes of this one; returns milliseconds by function."""
    batch = max(options.batches)
    with small_model(options, 0.6) as (llm, _), tempfile.TemporaryDirectory() as directory:
        cases = [case for case in make_cases(llm, options) if case.batch == batch]
        case = next(one for one in cases if one.params.is_greedy != options.sampled and (one.drafter is not None) == options.drafts)
        use(llm, case.drafter)
        prompts, stacks = random_prompts(llm, batch), Path(directory) / "stacks.txt"
        command = [options.sampler, "record", "--pid", str(os.getpid()), "--function", "--format", "raw", "--output", str(stacks)]
        command += ["--rate", str(SAMPLES_PER_S), "--duration", str(options.seconds)]
        seconds, num_steps = 0.0, -llm.engine.stats.num_steps
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sampler:
            while sampler.poll() is None:
                start = perf_counter()
                llm.generate(prompts, case.params)
                seconds += perf_counter() - start
        num_steps += llm.engine.stats.num_steps
        top = read_stacks(stacks.read_text(encoding="utf-8"), ROOT)
    unit_ms = 1e3 * seconds / num_steps / max(1, top.samples)
    what = f"{'top-p 0.9' if options.sampled else 'greedy'}, {DRAFT_TOKENS if options.drafts else 'no'} drafts each"
    title = f"one step of the engine in milliseconds: batch {batch}, {what}, V = {options.vocab}, two small layers"
    options.flame.write_text(draw(top, title, unit_ms), encoding="utf-8")
    rows = table(top, unit_ms, options.lines)
    print(f"\n{title}\n")
    print("\n".join(f"{milliseconds:8.3f}  {name}" for name, milliseconds in rows.items()))
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flame", type=Path, metavar="SVG", help="draw this instead, of the largest batch")
    parser.add_argument("--sampler", default="py-spy", help="for --flame: the py-spy program")
    parser.add_argument("--seconds", type=int, default=20, help="for --flame")
    parser.add_argument("--sampled", action="store_true", help="for --flame: top-p 0.9 instead of greedy")
    parser.add_argument("--drafts", action="store_true", help="for --flame: with drafts")
    parser.add_argument("--lines", type=int, default=45, help="for --flame: functions listed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--accuracy", type=float, default=0.7, help="of the drafter")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    return parser.parse_args()


def main() -> None:
    options = _options()
    result: dict[str, Any] = {"machine": describe_machine()}
    print(f"machine: {json.dumps(result['machine'])}")
    if options.flame:
        result["flame"] = draw_step(options)
    else:
        result["host"] = bench_host(options)
    print(f"\nload average afterwards: {describe_machine()['load_average']}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
