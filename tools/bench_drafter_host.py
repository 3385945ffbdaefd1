"""Host time of a step by drafter: its wall time less the kernels' runs, with drafters that need no network and with a draft model.

    python tools/bench_drafter_host.py --vocabs 8192 32000 152064 --batches 1 16
    python tools/bench_drafter_host.py --controller --drafters ngram --vocabs 152064
    python tools/bench_drafter_host.py --profile suffix --batches 1 --vocabs 152064 --sampled

The model says a cycle of tokens, so that every drafter finds what to guess, and a share of other tokens where it is sampled. Cases take
turns in one process; medians over all steps that had guesses are reported, and plain steps beside them. With `--controller` its thinking of
how much to draft is part of the steps; else the same number is drafted always.
"""

import argparse
import cProfile
import importlib
import json
import pstats
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from bench_host import DRAFT_TOKENS, LLM, SEED, TimedKernels, speculator_of
from bench_machine import describe_machine, markdown_table
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.runtimes.native import execution
from paceline.sampling.params import SamplingParams
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.request import Request

CYCLE = 48
HIDDEN = 128
TEMPERATURE, TOP_P = 0.7, 0.9
FIRST_TOKENS = 2  # of a request; the steps that bring them are left out
SHARE_BEHIND = {"flat": 0.3, "peaked": 1e-4}  # of the mass that is not on the next token of the cycle, at the temperature
WITHOUT_NETWORK: dict[str, Callable[[], list[Drafter]]] = {
    "ngram": lambda: [NgramDrafter()],
    "suffix": lambda: [SuffixDrafter()],
    "prediction": lambda: [PredictionDrafter()],
    "combined": lambda: [NgramDrafter(), SuffixDrafter(), PredictionDrafter()],
}
DRAFTERS = ("none", *WITHOUT_NETWORK, "draft_model")


def write_cycling_model(directory: Path, vocab: int, share: float) -> Path:
    """A model whose layers add nothing: each token leads to the next one of a cycle, and a share of the mass is spread over all."""
    write_checkpoint = importlib.import_module("harness.checkpoints").write_checkpoint
    write_checkpoint(directory, "llama", hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=vocab, max_position_embeddings=2048)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    random = np.random.default_rng(SEED)
    places = np.arange(vocab) % CYCLE
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["model.embed_tokens.weight"] = np.eye(CYCLE, HIDDEN, dtype=np.float32)[places]
    feature = float(np.sqrt(HIDDEN))  # the norm of a row with one value
    head = (random.normal(size=(vocab, HIDDEN)) / feature).astype(np.float32)
    background = np.log(vocab) + 0.5 / TEMPERATURE**2  # of exp(logit / T), in logarithms
    peak = TEMPERATURE * (background + np.log((1.0 - share) / share))
    first = 10  # ids below are special
    cycle = first + (np.arange(CYCLE) - first) % CYCLE
    head[cycle[(np.arange(CYCLE) + 1) % CYCLE], np.arange(CYCLE)] = peak / feature
    tensors["lm_head.weight"] = head
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@contextmanager
def opened(vocab: int, logits: str, options: argparse.Namespace) -> Iterator[tuple[LLM, Drafter, TimedKernels]]:
    """The model, its draft model and the clock of the kernels of both."""
    timed = TimedKernels(execution.kernels(), _clock(options))
    original, execution.kernels = execution.kernels, lambda: timed  # type: ignore[assignment,return-value]
    try:
        with tempfile.TemporaryDirectory() as folder:
            target, draft = (write_cycling_model(Path(folder) / name, vocab, SHARE_BEHIND[logits]) for name in ("target", "draft"))
            with LLM(str(target), drafter=str(draft), backend="native", threads=options.threads, max_num_seqs=max(options.batches)) as llm:
                assert llm.drafter is not None
                yield llm, llm.drafter, timed
    finally:
        execution.kernels = original


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one kind."""

    drafter: str
    batch: int
    is_sampled: bool

    @property
    def params(self) -> SamplingParams:
        sampled = {"temperature": TEMPERATURE, "top_p": TOP_P} if self.is_sampled else {"temperature": 0.0}
        return partial(SamplingParams, ignore_eos=True, seed=SEED)(**sampled)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step in which all requests took part: milliseconds outside the kernels and in them, guesses and tokens of a request."""

    host_ms: float
    kernels_ms: float
    num_draft_tokens: float
    num_emitted_tokens: float


def requests_of(llm: LLM, case: Case, max_tokens: int) -> list[Request]:
    """Requests that begin at several places of the cycle; the prediction is the cycle itself."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=SEED, temperature=case.params.temperature, top_p=case.params.top_p)
    ids = [10 + place for place in range(CYCLE)] * (2 + (max_tokens + 64) // CYCLE)
    prompts = [ids[first : first + 64] for first in range(case.batch)]
    options: dict[str, Any] = {}
    if case.drafter in ("prediction", "combined"):
        options["prediction"] = [ids[first + 64 : first + 64 + max_tokens] for first in range(case.batch)]
    return llm._loaded.requests(prompts, params, options, is_streamed=False)  # type: ignore[arg-type]


def policy_of(llm: LLM, options: argparse.Namespace) -> Callable[[], FixedDraftLength]:
    """What makes a policy; to be asked for before the one that the model was opened with is replaced."""
    known: Any = llm.engine.speculator.policy
    return partial(AdaptiveDraftLength, DRAFT_TOKENS, known.cost.profile) if options.controller else partial(FixedDraftLength, DRAFT_TOKENS)


def time_steps(
    llm: LLM, made: Sequence[Drafter], case: Case, kernels: TimedKernels, options: argparse.Namespace, policy: FixedDraftLength
) -> list[StepTime]:
    """The steps in which all requests took part."""
    llm.engine.speculator = speculator_of(llm, made, policy)
    requests = requests_of(llm, case, options.max_tokens)
    steps: list[StepTime] = []
    clock = _clock(options)
    with closing(llm.engine.run(requests)) as run:
        while True:
            emitted, drafted = (
                _sum(requests, count) for count in (lambda one: one.num_output_tokens, lambda one: one.stats.num_draft_tokens)
            )
            is_steady = all(request.num_output_tokens > FIRST_TOKENS and not request.is_finished for request in requests)
            inside, start = kernels.paceline_run.seconds, clock()
            if next(run, run) is run:
                return steps
            wall = clock() - start
            inside = kernels.paceline_run.seconds - inside
            drafted = _sum(requests, lambda one: one.stats.num_draft_tokens) - drafted
            if is_steady:
                emitted = _sum(requests, lambda one: one.num_output_tokens) - emitted
                steps.append(StepTime(1e3 * (wall - inside), 1e3 * inside, drafted / case.batch, emitted / case.batch))


def _clock(options: argparse.Namespace) -> Callable[[], float]:
    return thread_time if options.processor_clock else perf_counter


def _sum(requests: Sequence[Request], count: Callable[[Request], int]) -> int:
    return sum(map(count, requests))


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A table with a line for each kind of step."""
    results: list[dict[str, Any]] = []
    for vocab in options.vocabs:
        for logits in options.logits:
            with opened(vocab, logits, options) as (llm, draft_model, kernels):
                made = {name: make() for name, make in WITHOUT_NETWORK.items()} | {"none": [], "draft_model": [draft_model]}
                cases = [Case(name, batch, s) for batch in options.batches for s in (False, True) for name in options.drafters]
                cases = [case for case in cases if case.is_sampled or logits == options.logits[0]]  # greedy rows cost the same
                own: dict[Case, list[StepTime]] = {case: [] for case in cases}
                make_policy = policy_of(llm, options)
                policies = {case: make_policy() for case in cases}
                for _ in range(options.repeats):
                    for case in cases:
                        own[case] += time_steps(llm, made[case.drafter], case, kernels, options, policies[case])
            rows = [_row(vocab, logits, case, steps) for case, steps in own.items()]
            print(f"\n{markdown_table(list(rows[0]), [list(row.values()) for row in rows])}", flush=True)
            results += rows
    return results


def _row(vocab: int, logits: str, case: Case, steps: Sequence[StepTime]) -> dict[str, Any]:
    drafting = [step for step in steps if step.num_draft_tokens >= 1.0] or list(steps)
    host = np.array([step.host_ms for step in drafting])
    return {
        "ids": vocab,
        "batch": case.batch,
        "sampling": f"top-p, {logits}" if case.is_sampled else "greedy",
        "drafter": case.drafter,
        "host ms (p90)": f"{np.median(host):.3f} ({np.quantile(host, 0.9):.3f})",
        "guesses": f"{np.mean([step.num_draft_tokens for step in drafting]):.1f}",
        "tokens": f"{np.mean([step.num_emitted_tokens for step in drafting]):.2f}",
        "kernels ms": f"{np.median([step.kernels_ms for step in drafting]):.2f}",
        "steps": len(drafting),
    }


def profile(options: argparse.Namespace) -> None:
    """Print where the host's time of one kind of step goes."""
    with opened(options.vocabs[0], options.logits[0], options) as (llm, draft_model, kernels):
        made = [draft_model] if options.profile == "draft_model" else WITHOUT_NETWORK.get(options.profile, list)()
        case = Case(options.profile, options.batches[0], options.sampled)
        policy = policy_of(llm, options)()
        time_steps(llm, made, case, kernels, options, policy)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(options.repeats):
            steps = time_steps(llm, made, case, kernels, options, policy)
        profiler.disable()
        print(f"{len(steps)} steps a round, {np.median([step.host_ms for step in steps]):.3f} ms with the profiler")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(options.lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[8192, 32000, 152064])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--logits", nargs="+", choices=SHARE_BEHIND, default=["flat", "peaked"])
    parser.add_argument("--profile", choices=DRAFTERS, help="print a profile of this drafter's steps instead, of the first of everything")
    parser.add_argument("--sampled", action="store_true", help="for --profile: top-p instead of greedy")
    parser.add_argument("--lines", type=int, default=40, help="for --profile: functions listed")
    parser.add_argument("--controller", action="store_true", help="let it decide how much to draft, up to as many tokens")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-clock", action="store_true", help="seconds of this thread on the processor instead of the wall's")
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    return parser.parse_args()


def main() -> None:
    options = _options()
    machine = describe_machine()
    print(f"machine: {json.dumps(machine)}")
    if options.profile:
        profile(options)
        return
    results = bench(options)
    print(f"\nload average afterwards: {describe_machine()['load_average']}")
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "host": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
