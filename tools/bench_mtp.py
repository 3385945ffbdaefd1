"""Tokens a second of plain decoding and of drafting with an MTP module whose guesses are right with a known probability, in turns.

    python tools/random_gguf.py DIR/qwen3.5-0.8b.gguf --model qwen3.5-0.8b-q8_0 --layers 24 --module
    python tools/bench_mtp.py DIR/qwen3.5-0.8b.gguf --num-ids 0 32768 --num-speculative-tokens 1 2 3

Random weights guess wrongly: the module runs as it always does, then what it proposes is replaced by tokens of a plain run, each right
with probability --accuracy. Whatever is compared takes turns in one process on one loaded model, round by round; the model is loaded
anew for each --num-ids. Reported are medians over rounds; ratios are of runs of the same round. Token ids are compared with the plain
run's. Guesses are right as often whatever --num-ids is: what a text loses by ids that are never guessed is not in the numbers.
"""

import argparse
import gc
import importlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench_machine import REPOSITORY, describe_machine, markdown_table

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from paceline.llm import LLM  # noqa: E402
from paceline.outputs import RequestOutput  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.speculation.draft_length.policy import FixedDraftLength  # noqa: E402
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter  # noqa: E402
from paceline.speculation.request import Request  # noqa: E402
from paceline.speculation.speculator import Speculator  # noqa: E402
from paceline.speculation.tree import DraftTree  # noqa: E402

SEED = 7
HEAD = ["num_ids", "draft tokens", "plain tokens/s", "mtp tokens/s", "ratio", "lowest to highest", "tokens a step", "accepted"]


class ToldDrafter(Drafter):
    """A module that does all its work and then says what another drafter does."""

    name = "told"

    def __init__(self, module: Drafter, teller: Drafter) -> None:
        self._module, self._teller = module, teller
        self.needs, self.traits = module.needs, module.traits
        self.num_silent = 0  # proposals the module did not make

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        told = self._teller.propose(requests, budgets)
        for own, tree in zip(self._module.propose(requests, budgets), told, strict=True):
            self.num_silent += own is None or (tree is not None and own.num_draft_tokens < tree.num_draft_tokens)
        return told

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self._module.observe(rows)

    def release(self, request: Request) -> None:
        self._module.release(request)


def use(llm: LLM, drafter: Drafter | None, depth: int) -> None:
    """Draft with another drafter from now on, always so many tokens."""
    llm.engine.speculator = Speculator(
        [] if drafter is None else [drafter], FixedDraftLength(depth), vocab_size=llm.vocab_size, layout=llm.engine.cache.layout
    )


def bench(options: argparse.Namespace, num_ids: int) -> list[list[str]]:
    """Rows of the table for one number of ids; 0 = all."""
    given = {"draft_vocab_size": num_ids} if num_ids else {}
    llm = LLM(
        str(options.model), drafter="mtp", drafter_options=given, num_speculative_tokens=max(options.num_speculative_tokens),
        threads=options.threads, max_model_len=options.prompt + options.max_tokens + 64, max_num_seqs=1, enable_prefix_caching=False,
    )  # fmt: skip
    module = llm.drafter
    if module is None:
        raise RuntimeError("the model was opened without its module")
    print(f"- {llm.banner}", file=sys.stderr)
    prompt = [int(token) for token in np.random.default_rng(SEED).integers(10, llm.vocab_size, options.prompt)]
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, ignore_eos=True, seed=SEED)
    use(llm, None, 1)
    answer = llm.generate(prompt, params)[0].token_ids
    oracle = importlib.import_module("harness.adversaries").OracleDrafter
    answers = {(tuple(prompt), SEED): answer}
    depths: list[int] = options.num_speculative_tokens
    told = {
        depth: ToldDrafter(module, oracle(answers, accuracy=options.accuracy, vocab_size=llm.vocab_size, seed=SEED)) for depth in depths
    }
    runs: dict[int, list[RequestOutput]] = {0: [], **{depth: [] for depth in depths}}  # 0 = plain
    for repeat in range(options.repeats + 1):  # the first round warms up
        order = list(runs) if repeat % 2 else list(runs)[::-1]
        for depth in order:
            use(llm, told[depth] if depth else None, depth or 1)
            (output,) = llm.generate(prompt, params)
            if output.token_ids != answer:
                raise RuntimeError(f"{depth} draft tokens, {num_ids} ids: other tokens than plain decoding")
            if repeat:
                runs[depth].append(output)
        print(f"{num_ids or 'all'} ids: round {repeat} of {options.repeats} done", file=sys.stderr)
    if silent := sum(one.num_silent for one in told.values()):
        print(f"- the module guessed less than was told in {silent} steps", file=sys.stderr)
    if failures := llm.stats().drafter_failures:
        raise RuntimeError(f"the drafter failed {failures} times")
    return [_row(num_ids, depth, runs[0], runs[depth]) for depth in depths]


def _row(num_ids: int, depth: int, plain: Sequence[RequestOutput], own: Sequence[RequestOutput]) -> list[str]:
    ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(own, plain, strict=True)]
    speeds = [statistics.median(output.tokens_per_s for output in runs) for runs in (plain, own)]
    stats = [output.speculation for output in own]
    steps = sum(len(output.token_ids) - 1 for output in own) / sum(one.steps - 1 for one in stats)
    accepted = sum(one.num_accepted_tokens for one in stats) / max(1, sum(one.num_draft_tokens for one in stats))
    row = [str(num_ids or "all"), str(depth), *(f"{speed:.2f}" for speed in speeds), f"{statistics.median(ratios):.3f}"]
    return [*row, f"{min(ratios):.3f} to {max(ratios):.3f}", f"{steps:.2f}", f"{accepted:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or directory with a module; weights may be random")
    parser.add_argument("--num-ids", type=int, nargs="+", default=[0], help="guess ids below it alone; 0 = all")
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--accuracy", type=float, default=0.7, help="probability that a guess is right")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=256, help="which guesses are right is drawn: few tokens say little")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for what was measured")
    options = parser.parse_args(arguments)
    machine = describe_machine()
    print(f"machine: {json.dumps(machine)}")
    rows: list[list[str]] = []
    for num_ids in options.num_ids:
        rows += bench(options, num_ids)
        gc.collect()  # of two models one is in memory
    print(f"\n{options.model.name}: guesses right with probability {options.accuracy}")
    print(f"{options.max_tokens} tokens a run, {options.repeats} rounds\n")
    print(markdown_table(HEAD, rows))
    print(f"\nload average afterwards: {describe_machine()['load_average']}")
    if options.out is not None:
        result: dict[str, Any] = {"machine": machine, "rows": [HEAD, *rows]}
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
