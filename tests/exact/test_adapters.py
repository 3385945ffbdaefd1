"""Promise 1 with adapters: a request's output does not depend on other requests in the batch, shared prompts or the cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.adapters import Asked, assert_equal, make_adapter, run_together
from harness.block_checkpoints import write_fitted_block
from harness.engine_jobs import BEYOND, HEADS, TEXT_DRAFTERS, Solo, open_drafting, write_heads_and_target
from harness.engine_traffic import check_clean, check_engine
from harness.exact_targets import skip_without_kernels
from paceline import LLM, CheckpointError, RequestError, SamplingParams
from paceline.engine import scheduler as scheduler_module
from paceline.kv_cache.block_pool import BlockPool
from paceline.models.adapters.adapter import Adapter
from paceline.outputs import RequestOutput
from paceline.runtimes.base import ForwardBatch, IntArray
from paceline.runtimes.native.adapters import AdapterMapping
from paceline.runtimes.native.network import NativeNetwork
from paceline.runtimes.native.records import Pass
from paceline.speculation.request import Request

NUM_BLOCKS = 11  # less than eight texts take
BLOCKS = ("dflash", "dspark-rnn")
CASES = [
    *(("llama", kind) for kind in TEXT_DRAFTERS),
    *((name, kind) for name, kinds in HEADS.items() for kind in kinds),
    *((name, "chaos") for name in ("gemma4", "qwen3_5", "gpt_oss")),
    *((name, kind) for name in ("llama", "gemma4", "qwen3_5") for kind in BLOCKS),
]
RARE = {("llama", "ngram"), ("llama", "suffix"), ("llama", "wrong"), ("mean", "eagle"), ("legible", "eagle"), ("gemma4", "chaos")}
RARE |= {("llama", "dflash"), ("gemma4", "dspark-rnn"), ("qwen3_5", "dflash")}


@dataclass(frozen=True)
class Given:
    """A target with adapters, requests for all of them, and what drafters load."""

    solo: Solo
    adapters: list[Adapter]
    asked: list[Asked]
    drafts: dict[str, Path]

    def open(self, kind: str, *, num_blocks: int = NUM_BLOCKS) -> LLM:
        known = {(tuple(one.prompt), one.params.seed or 0): one.beyond for one in self.asked}
        llm = open_drafting(kind, self.solo, known, self.drafts.get(kind, self.solo.directory), depth=4, num_blocks=num_blocks)
        for adapter in self.adapters:
            llm.engine.add_adapter(adapter)
        scheduler = llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, spare_blocks=0)  # so that requests are preempted
        return llm


GivenOf = Callable[[str], Given]


def some_adapters(solo: Solo) -> list[Adapter]:
    config = solo.llm.runtime.config
    return [
        make_adapter("plain", config, seed=1, rank=3, experts=True),
        make_adapter("tables", config, seed=2, rank=2, parts=("q_proj", "v_proj"), embedding=True, lm_head=True),
        make_adapter("whole", config, seed=3, parts=("down_proj",), saves=["embed_tokens", "lm_head"], biases=["o_proj"]),
        make_adapter("wide", config, seed=4, rank=20, experts=True),
    ]


def answer_alone(solo: Solo, prompt: list[int], params: SamplingParams, adapter: str | None) -> RequestOutput:
    (output,) = solo.llm.generate([prompt], params, adapter=adapter)
    return output


@pytest.fixture(scope="module")
def given_of(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, seed: int) -> Iterator[GivenOf]:
    made: dict[str, Given] = {}
    folder = tmp_path_factory.mktemp("heads")

    def make(name: str) -> Given:
        if name in made:
            return made[name]
        skip_without_kernels()
        directory, drafts = write_heads_and_target(folder, name) if name in HEADS else (checkpoint(name), {})
        solo = Solo(directory, "f32")
        adapters = some_adapters(solo)
        for adapter in adapters:
            solo.llm.engine.add_adapter(adapter)
        random = np.random.default_rng(seed)
        heads = [random.integers(1, solo.vocab_size, 58).tolist() for _ in range(2)]  # the answers go into a block of their own
        asked = []
        for number, adapter_name in enumerate([None, *(adapter.name for adapter in adapters), "plain", "whole", None]):
            prompt = [*heads[number % 3 == 1], *random.integers(1, solo.vocab_size, 1 + number % 2).tolist()]
            params = SamplingParams(max_tokens=12, temperature=0.9 * (number % 2), seed=number, logprobs=2, ignore_eos=True)
            answer = answer_alone(solo, prompt, params, adapter_name)
            longer = answer_alone(solo, prompt, replace(params, max_tokens=12 + BEYOND), adapter_name)
            asked.append(Asked(prompt, params, adapter_name, answer, longer.token_ids))
        sizes = {"hidden_size": solo.config.hidden_size, "num_layers": solo.config.num_layers}
        texts = [one.beyond for one in asked]
        drafts |= {kind: write_fitted_block(folder / f"{name}-{kind}", kind, texts, **sizes) for kind in BLOCKS if (name, kind) in CASES}
        made[name] = Given(solo, adapters, asked, drafts)
        return made[name]

    yield make
    made.clear()


@pytest.mark.spread(0.5)
@pytest.mark.parametrize(("target", "kind"), [pytest.param(*case, marks=[pytest.mark.long] if case in RARE else []) for case in CASES])
def test_batched_requests_with_several_adapters_equal_each_alone(target: str, kind: str, given_of: GivenOf) -> None:
    given = given_of(target)
    assert len({tuple(one.answer.token_ids) for one in given.asked}) > len(given.asked) // 2  # adapters matter
    llm = given.open(kind)
    first = run_together(llm, given.asked)
    assert_equal(llm, first, given.asked)
    again = run_together(llm, given.asked[::-1])  # now their prompts may be known
    assert_equal(llm, again, given.asked[::-1])
    assert llm.stats().num_preemptions > 0
    assert sum(request.num_cached_tokens for request in again) > 0
    check_clean(llm)
    if kind in ("draft_model", "oracle", *BLOCKS):
        assert llm.stats().speculation.num_draft_tokens > 0
        assert llm.stats().drafter_failures == 0


def test_two_adapters_with_the_same_prompt_share_no_block(given_of: GivenOf) -> None:
    given = given_of("llama")
    llm = given.open("none", num_blocks=60)
    prompt = given.asked[0].prompt
    params = SamplingParams(max_tokens=2)
    for name in (None, "plain", "wide"):
        (output,) = llm.generate([prompt], params, adapter=name)
        assert output.usage.num_cached_tokens == 0
        (output,) = llm.generate([prompt], params, adapter=name)
        assert output.usage.num_cached_tokens == 32
    (output,) = llm.generate([prompt], params, adapter=None, cache_salt=given.adapters[0].digest)
    assert output.usage.num_cached_tokens == 0  # no salt is an adapter's key


def test_removed_adapter_finishes_its_running_requests_only(given_of: GivenOf) -> None:
    given = given_of("llama")
    llm = given.open("none", num_blocks=60)
    one = next(one for one in given.asked if one.adapter == "plain")
    (request,) = llm._loaded.make_requests([one.prompt], one.params, {"adapter": "plain"}, is_streamed=False)
    (late,) = llm._loaded.make_requests([one.prompt], one.params, {"adapter": "plain"}, is_streamed=False)
    llm.engine.add_request(request)
    llm.engine.step()
    llm.unload_adapter("plain")
    with pytest.raises(RequestError, match="'plain', which is not loaded; loaded: 'tables', 'whole', 'wide'"):
        llm.generate([one.prompt], one.params, adapter="plain")
    with pytest.raises(RequestError, match="'plain', which is not loaded"):
        llm.engine.add_request(late)
    assert len(llm.runtime._shared.adapters) == 4  # type: ignore[attr-defined]
    other = make_adapter("plain", llm.runtime.config, seed=9)
    llm.engine.add_adapter(other)  # the name is free
    while llm.engine.has_work:
        llm.engine.step()
    assert_equal(llm, [request], [one])
    assert len(llm.runtime._shared.adapters) == 4  # type: ignore[attr-defined]
    (changed,) = llm.generate([one.prompt], one.params, adapter="plain")
    assert changed.token_ids != one.answer.token_ids
    check_clean(llm)


class Events:
    """Random loads, removals, requests, aborts and steps; names are used again for other adapters."""

    def __init__(self, given: Given, llm: LLM, random: np.random.Generator) -> None:
        self.given, self.llm, self._random = given, llm, random
        self._loaded: dict[str, str] = {}  # adapter that the name refers to now
        self._live: dict[Request, tuple[str | None, int]] = {}
        self._answers: dict[tuple[str | None, int], RequestOutput] = {}
        self.num_compared = self.num_refused = 0

    def next(self) -> None:
        random, engine = self._random, self.llm.engine
        match random.choice(["load", "unload", "request", "abort", "step"], p=[0.12, 0.1, 0.33, 0.03, 0.42]):
            case "load":
                free = [name for name in "abc" if name not in self._loaded]
                if free:
                    adapter = self.given.adapters[random.integers(4)]
                    self._loaded[free[0]] = adapter.name
                    engine.add_adapter(replace(adapter, name=free[0]))
            case "unload" if self._loaded:
                name = str(random.choice(list(self._loaded)))
                del self._loaded[name]
                self.llm.unload_adapter(name)
            case "request" if len(self._live) < 12:
                self._submit(str(random.choice(["a", "b", "c", ""])) or None, int(random.integers(len(self.given.asked))))
            case "abort" if self._live:
                engine.abort_request(list(self._live)[random.integers(len(self._live))])
            case _:
                engine.step()
                check_engine(engine)
        self.settle()

    def _submit(self, name: str | None, number: int) -> None:
        one = self.given.asked[number]
        options = {"adapter": name, "namespace": "one"}
        if name is not None and name not in self._loaded:
            with pytest.raises(RequestError, match="which is not loaded; loaded: "):
                self.llm._loaded.make_requests([one.prompt], one.params, options, is_streamed=False)  # type: ignore[arg-type]
            self.num_refused += 1
            return
        (request,) = self.llm._loaded.make_requests([one.prompt], one.params, options, is_streamed=False)  # type: ignore[arg-type]
        self.llm.engine.add_request(request)
        self._live[request] = (None if name is None else self._loaded[name], number)

    def settle(self) -> None:
        for request in [request for request in self._live if request.is_released]:
            key = self._live.pop(request)
            if key not in self._answers:
                one = self.given.asked[key[1]]
                self._answers[key] = answer_alone(self.given.solo, one.prompt, one.params, key[0])
            expected, found = self._answers[key], self.llm._loaded.make_output(request)
            assert request.error is None
            assert found.token_ids == expected.token_ids[: len(found.token_ids)], key
            assert found.logprobs == (expected.logprobs or [])[: len(found.token_ids)], key
            assert len(found.token_ids) == len(expected.token_ids) or found.finish_reason == "abort"
            self.num_compared += 1

    def end(self) -> None:
        while self.llm.engine.has_work:
            self.llm.engine.step()
        self.settle()
        assert not self._live
        check_clean(self.llm)
        assert set(self.llm.adapters) == set(self._loaded)
        assert len(self.llm.runtime._shared.adapters) == len(self._loaded)  # type: ignore[attr-defined]
        for name in list(self._loaded):
            self.llm.unload_adapter(name)
        assert self.llm.runtime._shared.adapters == {}  # type: ignore[attr-defined]
        assert self.llm.engine.adapters._adapter_of == {}


@pytest.mark.parametrize("kind", ["suffix_tree", "draft_model"])
def test_random_adapter_loads_and_removals_change_no_token(kind: str, given_of: GivenOf, seed: int, large_counts: bool) -> None:
    given = given_of("llama")
    llm = given.open(kind)
    for name in llm.adapters:
        llm.unload_adapter(name)
    events = Events(given, llm, np.random.default_rng(seed))
    for _ in range(10_000 if large_counts else 400):
        events.next()
    events.end()
    assert events.num_compared > 30
    assert events.num_refused > 5


# Planted faults


def share_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "block_hashes", _links_without_salt(BlockPool.block_hashes))


def _links_without_salt(links: Callable[..., object]) -> Callable[..., object]:
    return lambda index, token_ids, salt, chain, num_blocks: links(index, token_ids, b"", chain, num_blocks)


def mix_rows(patch: pytest.MonkeyPatch) -> None:
    real = ForwardBatch.rows_by_adapter

    def shifted(batch: ForwardBatch) -> dict[int, IntArray]:
        found = real(batch)
        return dict(zip(found, [*found.values()][::-1], strict=True))

    patch.setattr(ForwardBatch, "rows_by_adapter", shifted)


def mix_pairs(patch: pytest.MonkeyPatch) -> None:
    real = AdapterMapping.fill

    def fill(rows: AdapterMapping, record: Pass, *given: Any) -> None:
        real(rows, record, *given)
        if record.num_adapters:
            adapter_of_row: Any = rows._kept_alive[-1]
            adapter_of_row[...] = adapter_of_row[::-1].copy()

    patch.setattr(AdapterMapping, "fill", fill)


def lose_embedding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeNetwork, "_embed_with_adapters", lambda network, token_ids, batch: network.embed(token_ids))


def forget_after_preemption(patch: pytest.MonkeyPatch) -> None:
    real = scheduler_module.BlockManager.free_blocks

    def free(blocks: scheduler_module.BlockManager, request: Request) -> None:
        real(blocks, request)
        request.adapter_number = 0

    patch.setattr(scheduler_module.BlockManager, "free_blocks", free)


FAULTS = [
    *(("llama", plant) for plant in (share_blocks, mix_rows, lose_embedding, forget_after_preemption)),
    ("gpt_oss", mix_pairs),
]


@pytest.mark.parametrize(("target", "plant"), FAULTS)
def test_planted_adapter_faults_are_found(
    target: str, plant: Callable[[pytest.MonkeyPatch], None], given_of: GivenOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = given_of(target)
    llm = given.open("none")
    plant(monkeypatch)
    requests = [*run_together(llm, given.asked), *run_together(llm, given.asked)]
    with pytest.raises(AssertionError):
        assert_equal(llm, requests, [*given.asked, *given.asked])


def test_adapter_with_overflowing_values_fails_its_requests_only() -> None:
    with LLM("mini", drafter="none", threads=1) as llm:
        huge = make_adapter("huge", llm.runtime.config, seed=1, rank=2)
        llm.engine.add_adapter(
            replace(huge, low_rank_updates={name: replace(one, lora_b=one.lora_b * 1e20) for name, one in huge.low_rank_updates.items()})
        )
        expected = llm.generate("The cat", SamplingParams(max_tokens=4))[0].token_ids
        with pytest.raises(
            CheckpointError, match=r"with the adapter 'huge', whose values may be too large, .* wider dtype or kv_cache_dtype"
        ):
            llm.generate("The cat", SamplingParams(max_tokens=4), adapter="huge")
        assert llm.generate("The cat", SamplingParams(max_tokens=4))[0].token_ids == expected
