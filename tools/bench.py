"""Measure forward passes, speculation step by step, or the host time of a step. `paceline bench` measures whole outputs.

    python tools/bench.py passes --model mini DIR/model.gguf --quantization none int8 --rows 1 2 4 8 16 32
    python tools/bench.py turns --batches 1 4 16 --temperatures 0 1 --texts 6
    python tools/bench.py turns --modes plain oracle --accuracy 0.7 --prompt-tokens 4096 --kinds random
    python tools/bench.py drafts --model DIR/target.gguf --drafter DIR/dspark DIR/eagle3 --depths 1 3 5 7
    python tools/bench.py turns --model DIR/target.gguf --drafter DIR/dspark --modes plain scripted scripted_wrong --accuracy 0.8
    python tools/bench.py host --batches 1 16 --vocab 152064

passes: median milliseconds of a pass by its rows, after --cached rows. Models and settings take turns in one process.
    tools/random_gguf.py writes files in the shapes of published models; llama.cpp's llama-bench times the same files.
turns: engines with one target and one cache take turns step by step, in random order. Each has its own drafter and policy, which keep
    learning from text to text. A ratio is plain over the mode, for the seconds of one request without its prompt. All tokens must agree.
    With one thread, processor seconds are compared too: other programs disturb them less than the clock.
    scripted, scripted_wrong: the drafter of --drafter drafts, and its tokens are replaced by right ones, with the probability --accuracy
    each, or by wrong ones. So a head with random weights (tools/random_heads.py) costs what a trained one does.
drafts: median milliseconds of a proposal by its depth, next to those of a plain step.
host: wall time of a step less the kernels' run, on a small model with a large vocabulary.

Every mode prints the machine, a table and, with --out, writes everything to a JSON file.
"""

import argparse
import cProfile
import importlib
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from reporting import REPOSITORY, describe_machine, dict_table

if "--processor-clock" in sys.argv:  # before any module of paceline imports the other clock
    time.perf_counter = time.thread_time
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from harness.answer_drafters import OracleDrafter  # noqa: E402
from paceline.benchmarking.intervals import paired_ratio  # noqa: E402
from paceline.benchmarking.workloads import builtin_workload  # noqa: E402
from paceline.drafters.ngram import NgramDrafter  # noqa: E402
from paceline.drafters.prediction import PredictionDrafter  # noqa: E402
from paceline.drafters.suffix import SuffixDrafter  # noqa: E402
from paceline.engine.engine import Engine  # noqa: E402
from paceline.engine.inputs import RequestOptions  # noqa: E402
from paceline.engine.loader import DEFAULT_DRAFT_TOKENS  # noqa: E402
from paceline.engine.request import EngineRequest  # noqa: E402
from paceline.llm import LLM  # noqa: E402
from paceline.proof.exactness.adversaries import WrongDrafter  # noqa: E402
from paceline.runtimes.cost import time_passes  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.speculation.draft_length.explain import explain_policy  # noqa: E402
from paceline.speculation.draft_length.policy import AdaptiveDraftLength, FixedDraftLength  # noqa: E402
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter  # noqa: E402
from paceline.speculation.request import Request  # noqa: E402
from paceline.speculation.speculator import Speculator  # noqa: E402
from paceline.speculation.tree import DraftTree  # noqa: E402

SEED = 7
KINDS = ("chat", "arithmetic", "random")
MODES = ("plain", "again", "ngram", "suffix", "prediction", "no_prediction", "wrong", "oracle", "draft_model", "scripted", "scripted_wrong")
HOST_DRAFT_TOKENS = 4
HOST_PROMPT_TOKENS = 64
FIRST_TOKENS = 3  # output tokens whose steps `host` leaves out

Prompts = Sequence[Sequence[int]]
Answers = dict[tuple[tuple[int, ...], int], Sequence[int]]
Rows = list[dict[str, Any]]


def make_requests(llm: LLM, prompts: Prompts, params: SamplingParams) -> list[EngineRequest]:
    return llm._loaded.make_requests([list(prompt) for prompt in prompts], params, RequestOptions(), is_streamed=False)


def random_prompts(llm: LLM, count: int, num_tokens: int, random: np.random.Generator) -> list[list[int]]:
    return [[int(token) for token in random.integers(10, llm.vocab_size, num_tokens)] for _ in range(count)]


class PaidOracle(OracleDrafter):
    """Drafts as an oracle does, after another drafter drafted as many tokens.

    Attributes:
        seconds: of each proposal of the other drafter.
    """

    def __init__(self, paid: Drafter, answers: Answers, accuracy: float, vocab_size: int) -> None:
        super().__init__(answers, accuracy=accuracy, vocab_size=vocab_size, seed=SEED)
        self.paid, self.seconds = paid, list[float]()
        self.name, self.needs, self.traits = paid.name, paid.needs, paid.traits

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        start = time.perf_counter()
        trees = self.paid.propose(requests, [replace(budget, min_path_prob=0.0) for budget in budgets])  # its probabilities are random
        self.seconds.append(time.perf_counter() - start)
        depths = [0 if tree is None else tree.tree_depth for tree in trees]
        return super().propose(requests, [replace(budget, max_depth=depth) for budget, depth in zip(budgets, depths, strict=True)])

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self.paid.observe(rows)

    def release(self, request: Request) -> None:
        self.paid.release(request)


# passes


def bench_passes(options: argparse.Namespace) -> Rows:
    """One row a model and setting, with milliseconds by rows and relative to a pass of one row."""
    settings = [(model, quantization) for model in options.model for quantization in options.quantization]
    samples: list[dict[int, list[float]]] = [{count: [] for count in options.rows} for _ in settings]
    with ExitStack() as stack:
        llms = [
            stack.enter_context(
                LLM(model, drafter="none", quantization=quantization, threads=options.threads, backend=options.backend,
                    dtype=options.dtype, max_model_len=options.cached + max(options.rows))
            )
            for model, quantization in settings
        ]  # fmt: skip
        numerics = [llm.numerics for llm in llms]
        for number in range(options.repeats):
            for index in np.roll(range(len(llms)), number):
                llm = llms[index]
                timed = time_passes(
                    llm.runtime, llm.engine.cache, options.rows, max_model_len=llm.max_model_len, cached_len=options.cached, num_rounds=1
                )
                for count, seconds in timed.items():
                    samples[index][count].append(1e3 * seconds)
    lines = []
    for (model, quantization), kind, own in zip(settings, numerics, samples, strict=True):
        medians = {count: statistics.median(times) for count, times in own.items()}
        first = medians[options.rows[0]]
        cells = {f"M={count}, ms": f"{ms:.3f} (x {ms / first:.2f})" for count, ms in medians.items()}
        lines.append({"model": Path(model).name, "quantization": quantization, "numerics": kind, **cells})
    return lines


# turns


@dataclass(slots=True)
class Side:
    """One engine and what was measured of it.

    Attributes:
        requests: the batch that runs.
        wall_s, cpu_s: of each batch, seconds of each request from the step in which all have their first token.
        steps, tokens: of each batch.
    """

    name: str
    engine: Engine
    answers: Answers
    requests: list[EngineRequest] = field(default_factory=list)
    wall_s: list[list[float]] = field(default_factory=list)
    cpu_s: list[list[float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spent_s: tuple[float, float] = (0.0, 0.0)

    def begin(self, requests: list[EngineRequest]) -> None:
        """Add a batch and run it until each request has a token."""
        self.requests = requests
        for request in requests:
            self.engine.add_request(request)
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
        if profiler is not None:
            profiler.disable()
        for index, request in enumerate(self.requests):
            if request.is_finished and not self.wall_s[-1][index]:
                self.wall_s[-1][index], self.cpu_s[-1][index] = self.spent_s
        self.steps[-1] += 1


def make_side(name: str, llm: LLM, accuracy: float) -> Side:
    """An engine on the model's target and cache."""
    opened, answers = llm.engine, Answers()
    policy_in_use: Any = opened.speculator.policy
    drafters: dict[str, Drafter | None] = {
        "ngram": NgramDrafter(), "suffix": SuffixDrafter(), "prediction": PredictionDrafter(), "no_prediction": PredictionDrafter(),
        "draft_model": llm.drafter, "wrong": WrongDrafter(answers, llm.vocab_size),
        "oracle": OracleDrafter(answers, accuracy=accuracy, vocab_size=llm.vocab_size, seed=SEED),
    }  # fmt: skip
    if name.startswith("scripted") and llm.drafter is not None:
        drafters[name] = PaidOracle(llm.drafter, answers, 0.0 if name == "scripted_wrong" else accuracy, llm.vocab_size)
    drafter, policy = drafters.get(name), FixedDraftLength(DEFAULT_DRAFT_TOKENS)
    if drafter is not None:
        policy = AdaptiveDraftLength(DEFAULT_DRAFT_TOKENS, policy_in_use.cost.profile)
    speculator = Speculator([] if drafter is None else [drafter], policy, vocab_size=llm.vocab_size)
    return Side(name, Engine(opened.runtime, opened.cache, speculator, opened.scheduler.limits), answers)


def workload_prompts(llm: LLM, kind: str, count: int, num_tokens: int, random: np.random.Generator) -> list[list[int]]:
    """Prompts of a kind, drawn with replacement; texts differ by their seeds where they are sampled."""
    if kind == "random":
        return random_prompts(llm, count, num_tokens, random)
    workload = builtin_workload(kind)
    input_processor, found = llm._loaded.input_processor, []
    for _ in range(count):
        prompt = workload.prompts[int(random.integers(len(workload.prompts)))]
        found.append(
            input_processor.chat_token_ids([dict(one) for one in prompt.messages])
            if prompt.messages
            else input_processor.prompt_ids(prompt.text or "")
        )
    return found


def run_texts(llm: LLM, sides: Sequence[Side], prompts: list[list[int]], params: SamplingParams, options: argparse.Namespace) -> None:
    """One batch of texts on every side, step by step in random order."""
    random = np.random.default_rng(SEED + len(sides[0].steps))
    unrelated = random_prompts(llm, len(prompts), options.max_tokens, random)
    if {"wrong", "oracle", "scripted", "scripted_wrong"} & {side.name for side in sides}:
        plain = sides[0].engine.run(requests := make_requests(llm, prompts, params))
        for _ in plain:
            pass
        for side in sides:
            side.answers.update({(tuple(ids), one.seed): one.token_ids[len(ids) :] for ids, one in zip(prompts, requests, strict=True)})
    for side in sides:
        requests = make_requests(llm, prompts, params)
        if side.name == "prediction":
            for request, tokens in zip(requests, unrelated, strict=True):
                request.prediction_token_ids = tokens
        side.begin(requests)
    while waiting := [side for side in sides if not all(request.is_finished for request in side.requests)]:
        for index in random.permutation(len(waiting)):
            waiting[index].step(options.profiler if waiting[index].name == options.profile else None)
    texts = [[request.token_ids for request in side.requests] for side in sides]
    for side, own in zip(sides, texts, strict=True):
        side.tokens[-1] += sum(request.num_output_tokens for request in side.requests)
        if own != texts[0]:
            raise SystemExit(f"{side.name} emitted other tokens than {sides[0].name}")


def bench_batch(llm: LLM, batch: int, temperature: float, options: argparse.Namespace) -> Rows:
    """A row for each mode and kind of texts, and one for all kinds."""
    sides = [make_side(name, llm, options.accuracy) for name in options.modes]
    kinds: list[str] = []
    for index in range(options.warm_up + options.texts):
        for kind in options.kinds:
            random = np.random.default_rng((SEED, index, batch, KINDS.index(kind)))
            prompts = workload_prompts(llm, kind, batch, options.prompt_tokens, random)
            params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=SEED + index, temperature=temperature)
            run_texts(llm, sides, prompts, params, options)
            kinds.append(kind if index >= options.warm_up else "")
    for side in sides:
        if options.explain and side.engine.speculator.drafters:
            stats = side.engine.stats.speculation
            shares = ", ".join(f"{reason.value} {count / stats.steps:.3f}" for reason, count in stats.skip_counts.items())
            print(f"\n{side.name}, batch {batch}, T = {temperature}: {stats.steps} steps without a draft by reason: {shares}")
            print("\n".join(explain_policy(side.engine.speculator.policy)))
    lines = []
    for side in sides[1:]:
        for kind in (*options.kinds, "all"):
            chosen = [index for index, own in enumerate(kinds) if own == kind or (own and kind == "all")]
            lines.append({"batch": batch, "T": temperature, "texts": kind, "mode": side.name, **_compare(sides[0], side, chosen, batch)})
    return lines


def _compare(plain: Side, side: Side, chosen: Sequence[int], batch: int) -> dict[str, str]:
    def ratio(clock: str) -> str:
        found = paired_ratio(*([own for index in chosen for own in getattr(one, clock)[index]] for one in (plain, side)))
        return f"{found.median:.3f}" + ("" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})")

    steps, tokens = sum(side.steps[index] for index in chosen), sum(side.tokens[index] for index in chosen)
    seconds = sum(max(side.wall_s[index]) for index in chosen)
    per_step = {"tokens a step": f"{tokens / max(1, steps) / batch:.2f}", "ms a step": f"{1e3 * seconds / max(1, steps):.2f}"}
    return {"clock": ratio("wall_s"), "processor": ratio("cpu_s"), **per_step}


def bench_turns(options: argparse.Namespace) -> Rows:
    options.profiler = cProfile.Profile() if options.profile else None
    lines: Rows = []
    drafter = options.drafter or ("draft_model" if "draft_model" in options.modes else "ngram")
    with LLM(options.model, drafter=drafter, threads=options.threads, quantization=options.quantization, max_num_seqs=max(options.batches),
             enable_prefix_caching=True) as llm:  # fmt: skip
        for batch in options.batches:
            for temperature in options.temperatures:
                lines += bench_batch(llm, batch, temperature, options)
    if options.profiler is not None:
        pstats.Stats(options.profiler).sort_stats("tottime").print_stats(40)
    return lines


# drafts


def bench_drafts(options: argparse.Namespace) -> Rows:
    """A row for each drafter and depth."""
    lines: Rows = []
    random = np.random.default_rng(SEED)
    for drafter in options.drafter:
        with LLM(options.model, drafter=drafter, threads=options.threads, quantization=options.quantization) as llm:
            paid = llm.drafter
            assert paid is not None
            (prompt,) = random_prompts(llm, 1, options.prompt_tokens, random)
            params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=SEED)
            plain = time_text(llm, prompt, params, None)
            for depth in options.depths:
                answers = {(tuple(prompt), SEED): plain[0]}
                oracle = PaidOracle(paid, answers, options.accuracy, llm.vocab_size)
                tokens, step_s = time_text(llm, prompt, params, oracle, depth)
                if tokens != plain[0]:
                    raise SystemExit(f"with {drafter} other tokens were emitted")
                draft_ms, plain_ms = 1e3 * statistics.median(oracle.seconds[FIRST_TOKENS:]), 1e3 * statistics.median(plain[1])
                lines.append({
                    "drafter": Path(drafter).name, "depth": depth, "plain ms": f"{plain_ms:.2f}", "proposal ms": f"{draft_ms:.2f}",
                    "of a plain step": f"{draft_ms / plain_ms:.3f}", "step ms": f"{1e3 * statistics.median(step_s):.2f}",
                    "tokens a step": f"{len(tokens) / len(step_s):.2f}", "speedup": f"{sum(plain[1]) / sum(step_s):.3f}",
                })  # fmt: skip
    return lines


def time_text(
    llm: LLM, prompt: list[int], params: SamplingParams, drafter: Drafter | None, depth: int = 1
) -> tuple[list[int], list[float]]:
    """Emitted tokens, and the seconds of each step after the first token."""
    use_drafter(llm, drafter, depth)
    (request,) = make_requests(llm, [prompt], params)
    llm.engine.add_request(request)
    seconds: list[float] = []
    while not request.is_finished:
        has_token, start = request.num_output_tokens > 0, time.perf_counter()
        llm.engine.step()
        if has_token:
            seconds.append(time.perf_counter() - start)
    return list(request.output_token_ids), seconds


# host


class TimedKernels:
    """The compiled kernels, with a clock around the pass."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self.seconds = kernels, 0.0

    def paceline_run(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self._kernels.paceline_run(*arguments)
        self.seconds += time.perf_counter() - start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


@contextmanager
def small_model(options: argparse.Namespace, weight_scale: float) -> Iterator[tuple[LLM, TimedKernels]]:
    """A model with two small layers; the larger its weights, the more its logits differ."""
    write_checkpoint = importlib.import_module("harness.checkpoints").write_checkpoint
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), "llama", vocab_size=options.vocab, num_hidden_layers=2, initializer_range=weight_scale)
        llm = LLM(directory, drafter="none", backend="native", threads=options.threads, max_num_seqs=max(options.batches))
        target: Any = llm.runtime
        execution = target._programs[None].execution
        execution.kernels = TimedKernels(execution.kernels)
        yield llm, execution.kernels


def use_drafter(llm: LLM, drafter: Drafter | None, depth: int = HOST_DRAFT_TOKENS) -> None:
    """Draft a fixed number of tokens with a drafter from now on."""
    drafters, policy = [] if drafter is None else [drafter], FixedDraftLength(depth)
    llm.engine.speculator = Speculator(drafters, policy, vocab_size=llm.vocab_size)


def time_steps(llm: LLM, prompts: Prompts, params: SamplingParams, drafter: Drafter | None, kernels: TimedKernels) -> list[Sequence[float]]:
    """(host seconds, kernel seconds, emitted tokens) of each step in which all requests had full drafts, or none."""
    use_drafter(llm, drafter)
    requests = make_requests(llm, prompts, params)
    num_drafts = HOST_DRAFT_TOKENS * len(prompts) if drafter is not None else 0

    def counts() -> tuple[int, int]:
        return sum(one.num_output_tokens for one in requests), sum(one.stats.num_draft_tokens for one in requests)

    steps: list[Sequence[float]] = []
    with closing(llm.engine.run(requests)) as run:
        while True:
            before, kernels_before = counts(), kernels.seconds
            is_steady = all(one.num_output_tokens > FIRST_TOKENS and not one.is_finished for one in requests)
            start = time.perf_counter()
            if next(run, run) is run:
                return steps
            wall_s, kernel_s = time.perf_counter() - start, kernels.seconds - kernels_before
            emitted, drafted = (after - one for after, one in zip(counts(), before, strict=True))
            if is_steady and drafted == num_drafts:
                steps.append((wall_s - kernel_s, kernel_s, emitted))


def bench_host(options: argparse.Namespace) -> Rows:
    """Greedy and top-p 0.9, with and without drafts, for each batch size."""
    samples: dict[tuple[str, int, float, int], list[Sequence[float]]] = {}
    for logits, scale in (("flat", 0.15), ("peaked", 0.6)):
        with small_model(options, scale) as (llm, kernels):
            prompts = random_prompts(llm, max(options.batches), HOST_PROMPT_TOKENS, np.random.default_rng(SEED))
            for temperature, top_p in ((0.0, 1.0), (0.7, 0.9)):
                params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=SEED, temperature=temperature, top_p=top_p)
                use_drafter(llm, None)
                outputs = llm.generate(prompts, params)
                answers: Answers = {(tuple(prompt), SEED): output.token_ids for prompt, output in zip(prompts, outputs, strict=True)}
                oracle = OracleDrafter(answers, accuracy=options.accuracy, vocab_size=llm.vocab_size, seed=SEED)
                for _ in range(options.repeats):
                    for batch in options.batches:
                        for drafter in (None, oracle):
                            key = (logits, batch, temperature, 0 if drafter is None else HOST_DRAFT_TOKENS)
                            samples.setdefault(key, []).extend(time_steps(llm, prompts[:batch], params, drafter, kernels))
    return [_host_row(*key, steps) for key, steps in samples.items()]


def _host_row(logits: str, batch: int, temperature: float, num_drafts: int, steps: Sequence[Sequence[float]]) -> dict[str, Any]:
    host, inside, emitted = (np.array(part, np.float64) for part in zip(*steps, strict=True))
    median, high = 1e3 * np.median(host), 1e3 * np.quantile(host, 0.9)
    return {
        "logits": logits, "batch": batch, "T": temperature, "drafts": num_drafts, "tokens a step": f"{emitted.mean():.2f}",
        "host ms (p90)": f"{median:.3f} ({high:.3f})", "host ms a token": f"{median / emitted.mean():.3f}",
        "kernels ms": f"{1e3 * np.median(inside):.3f}", "steps": len(steps),
    }  # fmt: skip


# command line


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    passes, turns, drafts, host = (modes.add_parser(name) for name in ("passes", "turns", "drafts", "host"))
    passes.add_argument("--model", nargs="+", default=["mini"], help="directories, GGUF files or mini")
    passes.add_argument("--quantization", nargs="+", default=["none"])
    passes.add_argument("--backend", default="auto")
    passes.add_argument("--dtype", default="auto")
    passes.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    passes.add_argument("--cached", type=int, default=64, help="rows in the cache before the timed ones")
    for one in (turns, drafts):
        one.add_argument("--model", default="mini")
        one.add_argument("--quantization", default="none")
        one.add_argument("--prompt-tokens", type=int, default=48, help="of random prompts")
    drafts.add_argument("--drafter", nargs="+", required=True)
    drafts.add_argument("--depths", type=int, nargs="+", default=[1, 3, 5, 7])
    turns.add_argument("--drafter", help="directory of the head of scripted modes")
    turns.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="the first one is the baseline")
    turns.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    turns.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    turns.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    turns.add_argument("--texts", type=int, default=6, help="batches of each kind")
    turns.add_argument("--warm-up", type=int, default=1, help="batches of each kind before them that are not counted")
    turns.add_argument("--profile", choices=MODES, help="print a profile of this mode's steps")
    turns.add_argument("--processor-clock", action="store_true", help="decide by processor seconds too: on a busy machine")
    turns.add_argument("--explain", action="store_true", help="print what each policy decided by")
    host.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    host.add_argument("--vocab", type=int, default=32000)
    for one, threads, repeats in ((passes, 2, 7), (turns, 1, 1), (drafts, 2, 1), (host, 2, 3)):
        one.add_argument("--threads", type=int, default=threads)
        one.add_argument("--out", type=Path, help="JSON file for everything measured")
        if one in (passes, host):
            one.add_argument("--repeats", type=int, default=repeats)
        if one is not passes:
            one.add_argument("--max-tokens", type=int, default=96)
            one.add_argument("--accuracy", type=float, default=0.7, help="of the oracle drafter")
    return parser.parse_args()


def main() -> None:
    options = _options()
    machine = describe_machine()
    print(f"machine: {json.dumps(machine)}\n")
    lines = {"passes": bench_passes, "turns": bench_turns, "drafts": bench_drafts, "host": bench_host}[options.mode](options)
    print(f"{dict_table(lines)}\n\nload average afterwards: {describe_machine()['load_average']}")
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, options.mode: lines}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
