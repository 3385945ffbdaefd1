"""Speculation on against off behind prompts of several lengths, with drafts that are right with a given chance.

    python tools/bench_context.py --work DIR --lengths 512 1024 2048 4096 8192 --accuracies 0 0.3 0.7
    python tools/bench_context.py --model PATH --quantization int8

The model is random unless one is named: what is measured is what passes and decisions cost. The drafter knows the plain text and errs
on purpose; how much it drafts is decided as ever. Of each length the prompt is read once, then both sides take turns in one process, on
the same cached rows; the text must be the same.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench_machine import REPOSITORY, describe_machine, markdown_table
from bench_models import Shape, write_llama

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from paceline.benchmarking.intervals import paired_ratio  # noqa: E402
from paceline.llm import LLM  # noqa: E402
from paceline.outputs import RequestOutput  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.speculation.drafter import DraftBudget, Drafter  # noqa: E402
from paceline.speculation.request import Request  # noqa: E402
from paceline.speculation.tree import DraftTree  # noqa: E402

SEED = 7
SHAPE = Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=32_000, context=16_384)  # 1.04 B
PARAMS = {"ignore_eos": True, "seed": SEED, "temperature": 0.0}


class ScriptedDrafter(Drafter):
    """Knows the answers; each guess is right with the chance `accuracy`, else another token."""

    name = "scripted"

    def __init__(self) -> None:
        self.accuracy = 0.0
        self.answers: dict[int, list[int]] = {}
        self._random = np.random.default_rng(SEED)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _guess(self, request: Request, budget: DraftBudget) -> DraftTree | None:
        start = request.num_output_tokens
        rest = self.answers[request.num_prompt_tokens][start : start + min(budget.max_depth, budget.row_budget - 1)]
        drafts = [token if self._random.random() < self.accuracy else 10 + token % 7 for token in rest]
        return DraftTree.chain(request.token_ids[-1], drafts, self.name) if drafts else None


def bench_length(llm: LLM, drafter: ScriptedDrafter, prompt: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each accuracy."""
    params = SamplingParams(max_tokens=options.tokens, **PARAMS)

    def answer(*, drafts: bool) -> RequestOutput:
        return llm.generate([prompt], params, speculation={"enabled": drafts})[0]

    drafter.answers[len(prompt)] = plain = answer(drafts=False).token_ids
    lines = []
    for drafter.accuracy in options.accuracies:
        times: dict[bool, list[float]] = {True: [], False: []}
        steps = []
        for number in range(options.rounds + 1):
            for drafts in (True, False) if number % 2 else (False, True):
                output = answer(drafts=drafts)
                if output.token_ids != plain:
                    raise SystemExit(f"another text behind {len(prompt)} rows")
                if number:
                    times[drafts].append(output.timing.decode_s)
                    steps += [output.speculation.mean_acceptance_length] if drafts else []
        lines.append(_line(len(prompt), drafter.accuracy, times, steps, options.tokens))
        print(json.dumps(lines[-1]), flush=True)
    return lines


def _line(length: int, accuracy: float, times: Mapping[bool, list[float]], steps: Sequence[float], tokens: int) -> dict[str, Any]:
    ratio = paired_ratio(times[False], times[True])
    off, on = (f"{1e3 * float(np.median(times[drafts])) / (tokens - 1):.1f}" for drafts in (False, True))
    return {
        "cached rows": length,
        "accuracy": accuracy,
        "off ms/token": off,
        "on ms/token": on,
        "tokens a step": f"{float(np.median(steps)):.2f}",
        "off / on": f"{ratio.median:.2f}",
        "95 %": "-" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}",
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("bench-context"), help="where the random model is written")
    parser.add_argument("--model", help="another model")
    parser.add_argument("--quantization", default="int8", choices=("none", "int8", "int4"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--accuracies", type=float, nargs="+", default=[0.0, 0.3, 0.7])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5, help="that count, behind one that does not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-gb", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    return parser.parse_args()


def main() -> None:
    options = _options()
    machine = describe_machine()
    print(f"machine: {json.dumps(machine)}")
    model = options.work / "random-llama"
    if options.model is None and not (model / "config.json").is_file():
        model.mkdir(parents=True, exist_ok=True)
        write_llama(model, SHAPE)
        importlib.import_module("harness.checkpoints").write_byte_level_tokenizer(model)
    drafter, lines = ScriptedDrafter(), []
    with LLM(
        options.model or str(model),
        quantization=options.quantization,
        drafter=drafter,
        threads=options.threads,
        kv_cache_gb=options.kv_cache_gb,
    ) as llm:
        text = [int(token) for token in np.random.default_rng(SEED).integers(17, llm.vocab_size, max(options.lengths))]
        for length in sorted(options.lengths):
            lines += bench_length(llm, drafter, text[:length], options)
    print("\n" + markdown_table(list(lines[0]), [list(line.values()) for line in lines]))
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
