"""Log-probabilities are the target's own: the same bits with any drafter and batch, and those of transformers within 1e-4."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engine_jobs import Solo, open_drafting
from harness.engine_targets import make
from harness.engine_traffic import check_clean, check_engine
from harness.exact_targets import skip_without_kernels
from harness.planted_faults import report_logprobs_of_the_next_row
from paceline import LLM, SamplingParams
from paceline.outputs import RequestOutput
from paceline.sampling import logprobs as logprobs_module
from paceline.speculation import commit as commit_module
from paceline.speculation import step as step_module
from paceline.speculation.request import Request

NUM_BLOCKS = 40
BOUND = 1e-4  # on the difference to transformers, in float32
BASE = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=4)
SAMPLINGS = {
    "greedy": BASE,
    "sampled": replace(BASE, temperature=1.1, top_p=0.9),
    "processed": replace(
        BASE, temperature=1.2, top_k=30, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={5: 3.0}, logprobs_mode="processed"
    ),
    "with the prompt's": replace(BASE, temperature=1.0, presence_penalty=0.6, logprobs=0, prompt_logprobs=3),
}
TARGETS = ["llama-f32", "qwen3-bf16", "qwen3-f32"]
DRAFTERS = ["ngram", "draft_model", "draft_tree", "oracle", "chaos"]
OUTPUT = ("token_ids", "text", "logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class Alone:
    """What requests get plainly decoded, alone, without cached rows: by sampling and prompt."""

    solo: Solo
    prompts: list[list[int]]
    answers: Mapping[tuple[str, int], RequestOutput]

    def params(self, name: str) -> SamplingParams:
        return replace(SAMPLINGS[name], seed=50 + list(SAMPLINGS).index(name))

    def known(self) -> dict[tuple[tuple[int, ...], int], list[int]]:
        return {
            (tuple(self.prompts[index]), self.params(name).seed or 0): answer.token_ids for (name, index), answer in self.answers.items()
        }

    def open(self, kind: str, **options: Any) -> LLM:
        given = {"depth": 4, "num_blocks": NUM_BLOCKS, **options}
        return open_drafting(kind, self.solo, self.known(), self.solo.directory, seed=3, **given)

    def check(self, output: RequestOutput, name: str, index: int) -> None:
        expected = self.answers[name, index]
        for part in OUTPUT:
            assert getattr(output, part) == getattr(expected, part), f"{part} of {name}, prompt {index}"


AloneOf = Callable[[str], Alone]


@pytest.fixture(scope="module")
def alone_of(checkpoint: Callable[[str], Path], seed: int) -> AloneOf:
    @cache
    def make_it(target: str) -> Alone:
        name, dtype = target.split("-")
        skip_without_kernels()
        solo = Solo(checkpoint(name), dtype)
        assert solo.llm.numerics == "exact"
        random = np.random.default_rng(seed)
        prompts = [random.integers(1, solo.vocab_size, length).tolist() for length in (1, 33, 100)]
        alone = Alone(solo, prompts, {})
        answers = {(name, i): solo.answer(prompt, alone.params(name))[0] for name in SAMPLINGS for i, prompt in enumerate(prompts)}
        return replace(alone, answers=answers)

    return make_it


def compare(alone: Alone, llm: LLM) -> None:
    """Every sampling: alone, again where the prompt is in the cache, and as a batch; then all samplings at once."""
    for name in SAMPLINGS:
        params = alone.params(name)
        for _ in range(2):
            for index, prompt in enumerate(alone.prompts):
                (output,) = llm.generate([prompt], params)
                alone.check(output, name, index)
        for index, output in enumerate(llm.generate(alone.prompts, params)):
            alone.check(output, name, index)
            hit = 0 if params.prompt_logprobs is not None else (len(alone.prompts[index]) - 1) // 32 * 32
            assert output.usage.num_cached_tokens == hit
    run_all(alone, llm, lambda number: None)


def run_all(alone: Alone, llm: LLM, between: Callable[[int], None]) -> dict[tuple[str, int], Request]:
    """Everything at once; `between` is called between any two steps."""
    requests = {(name, index): make(llm, alone.prompts[index], alone.params(name)) for name, index in alone.answers}
    for request in requests.values():
        llm.engine.add_request(request)
    for number in range(5_000):
        if not llm.engine.has_work:
            break
        llm.engine.step()
        check_engine(llm.engine)
        between(number)
    for (name, index), request in requests.items():
        alone.check(llm._loaded.make_output(request), name, index)
    check_clean(llm)
    return requests


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_logprobs_are_equal_alone_batched_cached_and_with_drafts(kind: str, target: str, alone_of: AloneOf, large_counts: bool) -> None:
    if not large_counts and (target, kind) not in ((TARGETS[0], "chaos"), (TARGETS[1], "draft_tree")):
        pytest.skip("left to make test-long")
    alone = alone_of(target)
    llm = alone.open(kind)
    compare(alone, llm)
    assert llm.stats().speculation.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["none", "chaos"])
@pytest.mark.parametrize("target", TARGETS[:2])
def test_preempted_requests_return_complete_logprobs(target: str, kind: str, alone_of: AloneOf, seed: int) -> None:
    alone = alone_of(target)
    random = np.random.default_rng(seed)
    for enable_prefix_caching in (True, False):
        llm = alone.open(kind, num_blocks=9, enable_prefix_caching=enable_prefix_caching)
        scheduler = llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, prefill_chunk_size=20, spare_blocks=0)

        def preempt(number: int, running: list[Request] = scheduler.running) -> None:
            if number % 3 == 0 and number < 120 and running:
                half_read = [
                    request for request in running if request.needs_prompt_logits and request.cached_sequence.committed_len
                ] or running
                scheduler.preempt(half_read[int(random.integers(len(half_read)))])  # noqa: B023

        requests = run_all(alone, llm, preempt)
        assert sum(request.num_preemptions > 0 for request in requests.values()) > 6
        assert any(request.num_preemptions for (name, index), request in requests.items() if name == "with the prompt's" and index == 2)


def test_text_cut_by_a_stop_string_has_no_logprobs(alone_of: AloneOf) -> None:
    alone = alone_of(TARGETS[0])
    llm = alone.open("oracle", depth=6)
    for name in SAMPLINGS:
        expected = alone.answers[name, 1]
        for count in range(1, 9):
            at = expected.token_ids.index(expected.token_ids[count])
            (output,) = llm.generate([alone.prompts[1]], replace(alone.params(name), stop_token_ids=[expected.token_ids[count]]))
            assert (output.token_ids, output.logprobs) == (expected.token_ids[: at + 1], (expected.logprobs or [])[: at + 1])
            text = llm.tokenizer.decode(expected.token_ids[: count + 1])[-4:]
            (output,) = llm.generate([alone.prompts[1]], replace(alone.params(name), stop=text))
            assert output.logprobs == (expected.logprobs or [])[: len(output.token_ids)]
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            assert [one.token_id for one in output.logprobs or []] == output.token_ids


@pytest.mark.parametrize("target", ["llama-f32", "qwen3-f32"])
def test_logprobs_equal_those_of_transformers(target: str, alone_of: AloneOf, large_counts: bool) -> None:
    if not large_counts and target != TARGETS[0]:
        pytest.skip("left to make test-long")
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    alone = alone_of(target)
    model = AutoModelForCausalLM.from_pretrained(alone.solo.directory, dtype=torch.float32).eval()
    compared = 0
    for (name, index), answer in alone.answers.items():
        if name == "processed":
            continue
        ids = [*alone.prompts[index], *answer.token_ids]
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1).numpy()
        start = len(alone.prompts[index])
        found = [*enumerate(answer.logprobs or [], start)]
        if answer.prompt_logprobs is not None:
            assert answer.prompt_logprobs[0] is None
            assert len(answer.prompt_logprobs) == start
            found += [(at, one) for at, one in enumerate(answer.prompt_logprobs) if one is not None]
        for at, one in found:
            row = rows[at - 1]
            assert one.token_id == ids[at]
            assert abs(one.logprob - row[ids[at]]) < BOUND
            assert 1 + (row > row[ids[at]] + BOUND).sum() <= one.rank <= 1 + (row > row[ids[at]] - BOUND).sum()
            best = np.sort(row)[::-1][: len(one.top)]
            assert len(one.top) == ((3 if at < start else 0) if name == "with the prompt's" else 4)
            assert np.allclose([value for _, value in one.top], best, rtol=0.0, atol=BOUND)
            assert all(abs(value - row[token]) < BOUND for token, value in one.top)
            compared += 1
    assert compared == 3 * 3 * 24 + sum(len(prompt) - 1 for prompt in alone.prompts)


def test_processed_logprobs_equal_the_sampling_distribution(alone_of: AloneOf) -> None:
    """Listed tokens are what top-k left; their probabilities sum to 1 with those not listed."""
    alone = alone_of(TARGETS[0])
    llm = alone.open("chaos")
    params = replace(alone.params("processed"), top_k=4)
    (output,) = llm.generate([alone.prompts[2]], params)
    for one in output.logprobs or []:
        assert sum(np.exp(value) for _, value in one.top) == pytest.approx(1.0, abs=1e-9)
        assert one.token_id in [token for token, _ in one.top]
        assert one.rank <= 4


# Planted faults: each must make the comparison above fail.


def test_comparison_of_logprobs_without_a_fault_passes(alone_of: AloneOf) -> None:
    alone = alone_of(TARGETS[0])
    compare(alone, alone.open("oracle"))


def take_processed_logprobs_after_commit(patch: pytest.MonkeyPatch) -> None:
    """Penalties would count the token itself."""
    real = step_module.commit

    def late(request: Request, token_ids: Any, num_accepted: int, **options: Any) -> int:
        count = real(request, token_ids, num_accepted, **{**options, "logprobs": ()})
        if request.params.logprobs is not None:
            request.logprobs.extend(asked.pop()()[:count])
        return count

    def remember(*args: Any) -> list[Any]:
        asked.append(lambda: commit_module.token_logprobs(*args))
        return []

    asked: list[Callable[[], list[Any]]] = []
    patch.setattr(step_module, "token_logprobs", remember)
    patch.setattr(step_module, "commit", late)


def report_processed_logprobs_for_raw_ones(patch: pytest.MonkeyPatch) -> None:
    def processed(row: Any, token: int, num_top: int) -> Any:
        return logprobs_module.raw_logprobs(row * np.float32(0.999), token, num_top)

    patch.setattr(commit_module, "raw_logprobs", processed)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    report_logprobs_of_the_next_row: "logprobs of",
    take_processed_logprobs_after_commit: "logprobs of processed",
    report_processed_logprobs_for_raw_ones: "logprobs of greedy",
}
"""And what the comparison says."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_logprobs_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], alone_of: AloneOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = alone_of(TARGETS[0])
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=FAULTS[plant]):
        compare(alone, alone.open("oracle"))


def test_fault_of_prompt_logprobs_with_cached_prompt_rows_is_found(alone_of: AloneOf, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = alone_of(TARGETS[0])
    llm, name = alone.open("oracle"), "with the prompt's"

    def match_prefix(self: Any, request: Request) -> None:
        self._cache.match_prefix(request.cached_sequence, request.token_ids)

    monkeypatch.setattr("paceline.engine.scheduler.BlockManager.match_prefix", match_prefix)
    (_, output) = (llm.generate([alone.prompts[2]], alone.params(name))[0] for _ in range(2))
    with pytest.raises(AssertionError, match="prompt_logprobs of"):
        alone.check(output, name, 2)
