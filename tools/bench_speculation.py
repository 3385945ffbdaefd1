"""What speculation brings to one request: on the embedded model, and with a drafter of known accuracy on a large checkpoint.

    python tools/bench_speculation.py --mini --heldout heldout.jsonl --out mini.json
    python tools/bench_speculation.py --oracle CHECKPOINT --dtype f32

Whatever is compared takes turns in one process, round by round, and medians over rounds are reported. Token ids of every speculative
run are compared with those of the plain run.
"""

import argparse
import importlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench_machine import REPOSITORY, describe_machine, markdown_table

sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]

from paceline.llm import LLM  # noqa: E402
from paceline.outputs import RequestOutput  # noqa: E402
from paceline.runtimes.cost import time_passes  # noqa: E402
from paceline.sampling.params import SamplingParams  # noqa: E402
from paceline.speculation.draft_length import DraftLengthPolicy, StepCosts  # noqa: E402
from paceline.speculation.drafter import Drafter  # noqa: E402
from paceline.speculation.speculator import Speculator  # noqa: E402
from paceline.speculation.stats import PlainReason, SpeculationStats  # noqa: E402

Answers = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
SEED = 7
HEADER = "<|im_start|>assistant\n"


def use(llm: LLM, drafter: Drafter | None, policy: DraftLengthPolicy) -> None:
    """Guess with another drafter from now on."""
    llm.engine.speculator = Speculator(drafter, policy, vocab_size=llm.vocab_size, layout=llm.engine.cache.layout)


def oracle(llm: LLM, answers: Answers, accuracy: float, seed: int) -> Drafter:
    made = importlib.import_module("harness.adversaries").OracleDrafter(answers, accuracy=accuracy, vocab_size=llm.vocab_size, seed=seed)
    return cast(Drafter, made)


def random_prompt(llm: LLM, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(SEED).integers(10, llm.vocab_size, length)]


def bench_mini(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The embedded model on held-out documents, one kind after the other."""
    names = ("none", "ngram", "auto")
    llms = {name: LLM("mini", drafter=name, num_draft_tokens=4, threads=options.threads, max_num_seqs=1) for name in names}
    if llms["auto"].drafter_name == "ngram":
        print("the embedded model brings no draft model: auto is ngram and is left out")
        del llms["auto"]
    if "auto" in llms:  # what the draft model is worth, wherever it does not pay
        llms["unguarded"] = LLM("mini", num_draft_tokens=4, threads=options.threads, max_num_seqs=1)
        llms["unguarded"].engine.speculator.policy = DraftLengthPolicy(4)
    for llm in llms.values():
        llm.generate("Once upon a time", SamplingParams(max_tokens=8))
        print(f"- {llm.banner}")
    prompts = held_out_prompts(options.heldout, options.prompts)
    results, compared, different = [], 0, 0
    for temperature in (0.0, 1.0):
        for kind, texts in prompts.items():
            outputs: dict[str, list[list[RequestOutput]]] = {name: [] for name in llms}
            for repeat in range(options.repeats):
                for own in outputs.values():
                    own.append([])
                for number, text in enumerate(texts):
                    params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=SEED + number)
                    for name in _turn(list(llms), repeat + number):
                        outputs[name][-1].append(llms[name].generate(text, params)[0])
            results += _mini_rows(kind, temperature, outputs)
            for name in outputs:
                for plain, other in zip(chain(*outputs["none"]), chain(*outputs[name]), strict=True):
                    compared += len(plain.token_ids) if name != "none" else 0
                    different += plain.token_ids != other.token_ids
    head = ["kind", "T", "drafter", "tokens a step", "acceptance rate", "guarded steps", "tokens/s", "× plain", "tokens", "prompts"]
    print(f"\nembedded model, {llms['none'].numerics}, 4 draft tokens, decoding only\n")
    print(markdown_table(head, [list(result["row"]) for result in results]))
    print(f"\n{compared} token ids of speculative runs compared with the plain run's: {different} runs differ")
    return results


def _turn(names: list[str], count: int) -> list[str]:
    first = count % len(names)
    return names[first:] + names[:first]


def _mini_rows(kind: str, temperature: float, outputs: Mapping[str, list[list[RequestOutput]]]) -> list[dict[str, Any]]:
    """One result a drafter; the times of a round's prompts are summed before rounds are compared."""
    seconds = {name: [sum(output.timing.decode_s for output in runs) for runs in rounds] for name, rounds in outputs.items()}
    results = []
    for name, rounds in outputs.items():
        stats = SpeculationStats()
        for output in chain(*rounds):
            stats.add(output.speculation)
        tokens = sum(len(output.token_ids) - 1 for output in rounds[0])
        ratio = statistics.median(plain / own for plain, own in zip(seconds["none"], seconds[name], strict=True))
        row = [kind, temperature, name, f"{stats.mean_acceptance_length:.2f}", f"{stats.acceptance_rate:.2f}"]
        row += [f"{stats.plain[PlainReason.GUARD] / max(1, stats.steps):.0%}", f"{tokens / statistics.median(seconds[name]):.1f}"]
        results.append({"row": [*row, f"{ratio:.2f}", tokens, len(rounds[0])], "seconds": seconds[name], "stats": stats.as_dict()})
    return results


def held_out_prompts(path: Path, count: int) -> dict[str, list[str]]:
    """Prompts by kind: chats up to the assistant header nearest their middle, other documents their first third."""
    prompts: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        kind, text = document["kind"], document["text"][:3000]
        ends = [end + len(HEADER) for end in range(len(text)) if text.startswith(HEADER, end)]
        cut = min(ends, key=lambda end: abs(end - len(text) / 2)) if ends and "chat" in kind else len(text) // 3
        if len(prompts[kind]) < count:
            prompts[kind].append(text[:cut])
    return dict(prompts)


def bench_oracle(options: argparse.Namespace) -> dict[str, Any]:
    """Guesses right with a known probability, on a checkpoint so large that the pass decides; then guesses that are always wrong."""
    if not (options.oracle / "tokenizer.json").is_file():
        vocab_size = json.loads((options.oracle / "config.json").read_text())["vocab_size"]
        importlib.import_module("harness.checkpoints").write_tokenizer(options.oracle, vocab_size)
    llm = LLM(str(options.oracle), drafter="none", dtype=options.dtype, threads=options.threads, max_context=1024, max_num_seqs=1)
    print("\n".join(f"- {notice}" for notice in llm.notices))
    depths = options.draft_tokens
    counts = sorted({1, 5, *(depth + 1 for depth in depths)})
    times = time_passes(llm.runtime, llm.engine.cache, counts, max_context=llm.max_context, repeats=options.pass_repeats)
    print(f"{llm.numerics}, {llm.runtime.capabilities.weight_type.value}, t(M) in ms: ", {m: round(1e3 * t, 1) for m, t in times.items()})
    prompt = random_prompt(llm, 64)
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=SEED)
    answers: Answers = {(tuple(prompt), SEED): llm.generate(prompt, params)[0].token_ids}
    wrong: Drafter = importlib.import_module("harness.adversaries").WrongDrafter(answers, llm.vocab_size)
    cases: dict[str, tuple[Drafter | None, int, StepCosts | None]] = {"plain": (None, 4, None)}
    for depth in depths:
        cases[str(depth)] = (oracle(llm, answers, options.accuracy, SEED + depth), depth, None)
    cases["wrong, guarded"] = (wrong, 4, StepCosts(times[1], times[5]))
    runs: dict[str, list[RequestOutput]] = {name: [] for name in cases}
    for repeat in range(options.repeats):
        for name in _turn(list(cases), repeat):
            drafter, depth, costs = cases[name]
            use(llm, drafter, DraftLengthPolicy(depth, costs=costs))
            runs[name] += llm.generate(prompt, params)
        print(f"round {repeat + 1} of {options.repeats} done", file=sys.stderr)
    different = sum(output.token_ids != runs["plain"][0].token_ids for own in runs.values() for output in own)
    compared = sum(len(output.token_ids) for name, own in runs.items() for output in own if name != "plain")
    rows = [_oracle_row(name, runs, times, options.accuracy) for name in runs]
    head = ["draft tokens", "tokens/s", "× plain", "predicted ×", "tokens a step", "expected", "× predicted from tokens a step"]
    print(f"\na drafter right with probability {options.accuracy}; {options.max_tokens} tokens a run, {options.repeats} rounds\n")
    print(markdown_table(head, rows))
    print(f"\n{compared} token ids of speculative runs compared with the plain run's: {different} runs differ")
    return {"pass_s": times, "rows": [head, *rows], "tokens_per_s": {name: [o.tokens_per_s for o in own] for name, own in runs.items()}}


def _oracle_row(name: str, runs: Mapping[str, list[RequestOutput]], times: Mapping[int, float], accuracy: float) -> list[str]:
    own = runs[name]
    speed = statistics.median(output.tokens_per_s for output in own)
    ratio = statistics.median(mine.tokens_per_s / plain.tokens_per_s for mine, plain in zip(own, runs["plain"], strict=True))
    emitted = sum(len(output.token_ids) - 1 for output in own) / sum(output.speculation.steps - 1 for output in own)
    row = [name, f"{speed:.3f}", f"{ratio:.3f}"]
    if not name.isdigit():
        return [*row, "", f"{emitted:.2f}", "", ""]
    depth = int(name)
    expected = (1 - accuracy ** (depth + 1)) / (1 - accuracy) if accuracy < 1 else depth + 1.0
    cost = times[1] / times[depth + 1]
    return [*row, f"{expected * cost:.3f}", f"{emitted:.2f}", f"{expected:.2f}", f"{emitted * cost:.3f}"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini", action="store_true", help="the embedded model, drafter none, ngram and auto")
    parser.add_argument("--oracle", type=Path, metavar="DIR", help="a checkpoint; gets a word-level tokenizer if it has none")
    parser.add_argument("--heldout", type=Path, help="for --mini: documents it has not seen, JSON lines with kind and text")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind, for --mini")
    parser.add_argument("--accuracy", type=float, default=0.7, help="for --oracle")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8], help="for --oracle")
    parser.add_argument("--pass-repeats", type=int, default=7, help="for --oracle: rounds that time t(M)")
    parser.add_argument("--dtype", choices=("auto", "f32", "bf16"), default="auto", help="for --oracle")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    options = parser.parse_args()
    if options.mini and options.heldout is None:
        parser.error("--mini needs --heldout")
    return options


def main() -> None:
    options = _options()
    result: dict[str, Any] = {"machine": describe_machine()}
    print(f"machine: {json.dumps(result['machine'])}")
    if options.mini:
        result["mini"] = bench_mini(options)
    if options.oracle:
        result["oracle"] = bench_oracle(options)
    print(f"\nload average afterwards: {describe_machine()['load_average']}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
