"""Promise 1 in the engine: a request's output does not depend on other requests, preemption or shared prompts."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.answer_drafters import ChaosDrafter
from harness.engine_jobs import HEADS, SAMPLINGS, TEXT_DRAFTERS, Job, JobMaker, Solo, known_of, open_drafting, write_heads_and_target
from harness.engine_traffic import Traffic, check_clean, check_engine
from harness.exact_targets import HYBRIDS, skip_without_kernels
from harness.spread import mark_cases
from paceline import LLM, AsyncEngine
from paceline.engine.engine import Engine
from paceline.engine.input_processor import InputProcessor
from paceline.kv_cache.block_pool import BlockHash, BlockPool
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import ForwardOutput
from paceline.runtimes.native.path_sampler import CompiledBatchPathSampler
from paceline.sampling.processors import EditedRow
from paceline.speculation import speculator as speculator_module
from paceline.speculation import step as step_module
from paceline.speculation import verify as verify_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.request import FinishReason, Request

Directory = Callable[[str], Path]
NUM_BLOCKS = 8  # one more than the longest request may need: most others must wait, be preempted or lose cached blocks
PLENTY = 40
MAX_ROUNDS = 12
TARGETS = [
    "mini-bf16",
    *(f"{name}-{dtype}" for name in ("llama", "qwen3", "sliding", "deepseek", "gemma4", "gpt_oss", *HYBRIDS) for dtype in ("f32", "bf16")),
]
CASES = [
    *((target, kind) for target in TARGETS for kind in TEXT_DRAFTERS),
    *((f"{name}-f32", kind) for name, kinds in HEADS.items() for kind in kinds),
    *(("successor-bf16", kind) for kind in HEADS["successor"]),
]
IN_A_NORMAL_RUN = {
    ("qwen3-bf16", "suffix"),
    ("mini-bf16", "draft_model"),
    *((name, "chaos") for name in ("gemma4-f32", "gpt_oss-bf16", "deepseek-bf16", "lfm3-f32", "granite-f32")),
    *((target, "draft_tree") for target in ("qwen3-f32", "sliding-f32", "qwen3_5-f32")),
    *((f"{name}-f32", kind) for name, kinds in HEADS.items() for kind in kinds),
    *(("llama-f32", kind) for kind in ("none", "ngram", "suffix_tree", "prediction", "several", "oracle", "wrong")),
}


@dataclass(frozen=True)
class Given:
    """A target, its requests with the expected outputs, and the files of its drafters by kind."""

    solo: Solo
    jobs: list[list[Job]]
    drafts: dict[str, Path]

    def open(self, kind: str, random: np.random.Generator, jobs: Sequence[Job], **options: Any) -> LLM:
        draft = self.drafts.get(kind, self.solo.directory)
        depth, seed = int(random.integers(2, 7)), int(random.integers(1 << 30))
        return open_drafting(kind, self.solo, known_of(jobs), draft, depth=depth, seed=seed, **{"num_blocks": NUM_BLOCKS, **options})


GivenOf = Callable[[str], Given]
Forward = Callable[..., ForwardOutput]
Faulty = Callable[..., None]


@pytest.fixture(scope="module")
def given_of(checkpoint: Directory, tmp_path_factory: pytest.TempPathFactory, large_counts: bool, seed: int) -> Iterator[GivenOf]:
    made: dict[str, Given] = {}
    folder = tmp_path_factory.mktemp("heads")

    def make(target: str) -> Given:
        if target not in made:
            name, dtype = target.split("-")
            skip_without_kernels()
            directory, drafts = write_heads_and_target(folder / dtype, name) if name in HEADS else (checkpoint(name), {})
            if (directory / "draft").is_dir():
                drafts = dict.fromkeys(("draft_model", "draft_tree"), directory / "draft")
            solo = Solo(directory, dtype)
            assert solo.llm.numerics == "exact"
            random = np.random.default_rng(seed + sum(map(ord, target)))
            if large_counts:
                count, sets, max_tokens = 64, 1 if name == "mini" else 3, 64
            else:
                count, sets, max_tokens = {"llama": 64, "mini": 12}.get(name, 20), 1, 10 if name == "mini" else 20
            input_processor = JobMaker(solo, random, max_tokens=max_tokens)
            made[target] = Given(solo, [input_processor.make(count) for _ in range(sets)], drafts)
        return made[target]

    yield make
    made.clear()


@pytest.mark.parametrize(("target", "kind"), mark_cases(CASES, IN_A_NORMAL_RUN))
def test_every_request_of_a_batch_equals_the_request_alone(
    target: str, kind: str, given_of: GivenOf, large_counts: bool, seed: int, tally: "Counter[str]"
) -> None:
    given = given_of(target)
    random = np.random.default_rng(seed + sum(map(ord, target + kind)))
    for jobs in given.jobs:
        for enable_prefix_caching in (True, False) if large_counts else (len(kind) % 2 == 0,):
            llm = given.open(kind, random, jobs, enable_prefix_caching=enable_prefix_caching)
            for _ in range(MAX_ROUNDS):  # one round, unless no request was preempted or nothing was evicted
                traffic = Traffic(llm, jobs, random)
                traffic.run()
                check_clean(llm)
                tally["token ids equal through the engine"] += traffic.num_compared
                assert traffic.num_ended == sum(len(job.answers) for job in jobs)
                assert traffic.num_compared == sum(job.num_tokens for job in jobs)
                if llm.stats().num_preemptions and (llm.engine.cache.prefix_stats.num_evicted_blocks or not enable_prefix_caching):
                    break
            stats, hits = llm.stats(), llm.engine.cache.prefix_stats
            assert stats.num_preemptions > 0
            assert stats.num_failed == stats.num_aborted == 0
            assert stats.speculation.num_draft_tokens > 0 or kind == "none" or (kind == "ngram" and not large_counts)
            if enable_prefix_caching:
                assert stats.num_cached_tokens > 0
                assert hits.num_evicted_blocks > 0
            else:
                assert stats.num_cached_tokens == hits.num_hit_tokens == hits.num_evicted_blocks == 0


def test_compared_requests_cover_all_sampling_and_ending_options(given_of: GivenOf) -> None:
    (jobs, *_) = given_of("llama-f32").jobs
    assert {job.name for job in jobs} == set(SAMPLINGS) - {"grammar"}
    assert len(jobs) == 64
    assert {answer.finish_reason for job in jobs for answer in job.answers} == {"stop", "length"}
    assert sum(job.parent is not None for job in jobs) > 4
    assert sum((len(job.prompt) + len(job.answers[0].token_ids)) % 32 == 0 for job in jobs) > 4
    assert len({tuple(job.prompt) for job in jobs}) < len(jobs), "some prompts are asked twice"
    assert len({tuple(job.prompt[:32]) for job in jobs}) < len({tuple(job.prompt[:64]) for job in jobs}) < len(jobs)
    assert sum(len(answer.token_ids) < len(job.beyond) for job in jobs for answer in job.answers[:1]) > 20


# Requests that come, are given up, preempted, interrupted and end in any order


def interrupted(forward: Forward, *, is_behind_pass: bool) -> Forward:
    """A pass that Ctrl-C ends, before its rows are in the cache or after."""

    def interrupt(*arguments: Any) -> ForwardOutput:
        if is_behind_pass:
            forward(*arguments)
        raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize("kind", ["chaos", "draft_tree", "several", "eagle3", "mtp"])
def test_random_engine_events_leak_no_block_and_change_no_token(
    kind: str, given_of: GivenOf, large_counts: bool, seed: int, tally: "Counter[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    given = given_of({"eagle3": "legible-f32", "mtp": "successor-f32"}.get(kind, "llama-f32"))
    random = np.random.default_rng(seed + sum(map(ord, kind)))
    jobs = given.jobs[0]
    llm = given.open(kind, random, jobs)
    engine, traffic = llm.engine, Traffic(llm, jobs, random)
    happened: Counter[str] = Counter()
    for _ in range(2_500 if large_counts else 200):
        event = random.choice(["submit", "abort", "preempt", "limits", "interrupt", "step"], p=[0.2, 0.06, 0.06, 0.02, 0.06, 0.6])
        running = engine.scheduler.running
        if event == "submit" and len(traffic.live) < 24:
            traffic.submit(int(random.integers(len(jobs))))
        elif event == "abort" and traffic.live:
            engine.abort_request(list(traffic.live)[int(random.integers(len(traffic.live)))])
        elif event == "preempt" and running:
            engine.scheduler.preempt(running[int(random.integers(len(running)))])
        elif event == "limits":
            traffic.change_limits()
        elif event == "interrupt" and running:
            is_behind_pass = bool(random.integers(2))
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(llm.runtime, "forward", interrupted(llm.runtime.forward, is_behind_pass=is_behind_pass))
                engine.step()
                continue  # there was no pass: the running request was preempted
            assert not any(request.error or request.cached_sequence.row_plan for request in traffic.live)
        elif event == "step":
            oldest = running[0] if running else None
            arrived = list(traffic.live)
            older = arrived[: arrived.index(oldest)] if oldest is not None else []  # preempted ones, which wait
            before = (oldest.cached_sequence.committed_len, oldest.num_output_tokens) if oldest is not None else (0, 0)
            engine.step()
            has_started = any(request not in engine.scheduler.waiting for request in older)
            goes_on = oldest is None or oldest.is_finished or (oldest.cached_sequence.committed_len, oldest.num_output_tokens) > before
            assert goes_on or has_started, "the oldest running request, unless an older one started"
        else:
            continue
        happened[str(event)] += 1
        check_engine(engine)
        traffic.settle()
    while engine.has_work:
        engine.step()
        traffic.settle()
    check_clean(llm)
    stats = engine.stats
    assert min(happened.values()) > 0
    assert stats.num_aborted + stats.num_finished == traffic.num_ended
    assert min(stats.num_aborted, stats.num_finished) > (50 if large_counts else 3)
    assert stats.num_preemptions > happened["preempt"] or not large_counts, "some for want of room"
    tally["random events in the engine"] += sum(happened.values())
    tally["token ids equal through the engine"] += traffic.num_compared


@pytest.mark.parametrize("kind", ["ngram", "chaos", "eagle"])
def test_streams_closed_at_any_time_free_their_blocks(
    kind: str, given_of: GivenOf, large_counts: bool, seed: int, tally: "Counter[str]"
) -> None:
    given = given_of("legible-f32" if kind == "eagle" else "llama-f32")
    random = np.random.default_rng(seed + sum(map(ord, kind)))
    (jobs, *_) = given.jobs
    llm = given.open(kind, random, jobs, num_blocks=2 * NUM_BLOCKS)
    engine = AsyncEngine(llm._loaded)
    ended: Counter[str] = Counter()

    async def call(job: Job, how: str, patience: float) -> None:
        options: dict[str, Any] = {"speculation": job.speculation, "cache_salt": job.salt}
        if how == "wait":
            for output, expected in zip(await engine.generate(job.prompt, job.params, **options), job.answers, strict=True):
                assert (output.token_ids, output.text, output.logprobs) == (expected.token_ids, expected.text, expected.logprobs), job.name
                tally["token ids equal through the engine"] += len(output.token_ids)
            return
        tokens: list[list[int]] = [[] for _ in job.answers]
        texts = [""] * len(job.answers)
        async with aclosing(engine.stream(job.prompt, job.params, **options)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                tokens[chunk.sample_index] += chunk.token_ids
                texts[chunk.sample_index] += chunk.text
                if how == "leave" and sum(map(len, tokens)) > patience * job.num_tokens:
                    break
        for found, text, expected in zip(tokens, texts, job.answers, strict=True):
            assert found == expected.token_ids[: len(found)], job.name
            assert expected.text.startswith(text), job.name
            assert how == "leave" or (found, text) == (expected.token_ids, expected.text), job.name
            tally["token ids equal through the engine"] += len(found)

    async def caller(mine: Sequence[Job]) -> None:
        for job in mine:
            how = str(random.choice(["wait", "stream", "leave", "cancel"]))
            task = asyncio.create_task(call(job, "stream" if how == "cancel" else how, float(random.random())))
            if how == "cancel":
                await asyncio.sleep(float(random.random()) * 0.03)
                ended["cancelled in time"] += task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(result, asyncio.CancelledError) and result is not None:
                raise result
            ended[how] += 1

    async def serve() -> None:
        async with engine:
            rounds = 12 if large_counts else 2
            callers = [caller([jobs[index] for index in random.integers(0, len(jobs), rounds)]) for _ in range(20)]
            await asyncio.wait_for(asyncio.gather(*callers), 280)
            while (stats := await engine.stats()).num_running + stats.num_waiting:
                await asyncio.sleep(0.001)
            check_engine(llm.engine)
            assert engine._worker._listeners == {}
            assert engine._worker.thread.is_alive()

    asyncio.run(serve())
    assert not engine._worker.thread.is_alive()
    check_clean(llm)
    assert min(ended.values()) > 0
    assert llm.stats().num_aborted > 0
    assert llm.stats().num_failed == 0


# Planted faults: each must make a request's tokens differ from those it gets alone.


@pytest.fixture
def faulty(given_of: GivenOf, seed: int) -> Faulty:
    """The first test of this file, small: other tokens are looked for, broken books are not."""
    given = given_of("llama-f32")  # here, so that a fault does not get into the answers that tokens are compared with
    (jobs, *_) = given.jobs

    def run(*, num_rounds: int = MAX_ROUNDS, num_blocks: int = NUM_BLOCKS) -> None:
        random = np.random.default_rng(seed)
        drafter = ChaosDrafter(known_of(jobs), given.solo.vocab_size, seed=seed, raises=False)
        llm = given.solo.open(drafter, num_speculative_tokens=4, num_blocks=num_blocks)
        llm.engine.speculator.policy = FixedDraftLength(4, max_rows=12)
        for _ in range(num_rounds):
            Traffic(llm, jobs, random).run(checks=False)

    return run


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, PLENTY])
def test_batch_comparison_passes_without_a_fault(faulty: Faulty, num_blocks: int) -> None:
    faulty(num_rounds=1, num_blocks=num_blocks)


def hash_blocks_without_their_parents(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.block_hashes

    def without_chain(
        self: BlockPool, token_ids: Sequence[int], salt: bytes, known: Sequence[BlockHash], num_blocks: int
    ) -> Iterator[BlockHash]:
        for block in range(len(known), num_blocks):
            yield from real(self, token_ids[block * 32 : block * 32 + 32], salt, (), 1)

    patch.setattr(BlockPool, "block_hashes", without_chain)


def let_noise_depend_on_preemptions(patch: pytest.MonkeyPatch) -> None:
    real, draw = verify_module.verify, EditedRow.draw

    def shifted(tree: Any, logits: Any, request: Any, walked: Any = None) -> Any:
        by = request.num_preemptions
        patch.setattr(EditedRow, "draw", lambda self, seed, sample, position: draw(self, seed, sample, position + by))
        return real(tree, logits, request)

    patch.setattr(speculator_module, "verify", shifted)


def evict_owned_blocks(patch: pytest.MonkeyPatch) -> None:
    """Blocks that are adopted stay in the line of those to be evicted; the books are kept, so that nothing else notices."""
    real = BlockPool.allocate

    def allocate(self: BlockPool, count: int) -> list[int]:
        before = list(self._owners)
        blocks = real(self, count)
        for block in blocks:
            self._owners[block] += before[block]
        return blocks

    def share(self: BlockPool, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._owners[block] += 1

    patch.setattr(BlockPool, "add_owner", share)
    patch.setattr(BlockPool, "allocate", allocate)


def register_partial_blocks(patch: pytest.MonkeyPatch) -> None:
    """The row of a text's last token is not there yet; where the text ends with a block it never comes."""
    real = KVCache.register_prefix

    def register(self: KVCache, sequence: Any, token_ids: Sequence[int]) -> None:
        committed = sequence.committed_len
        sequence.committed_len = min(len(token_ids), len(sequence.block_table) * self.block_size)
        real(self, sequence, token_ids)
        sequence.committed_len = committed

    patch.setattr(KVCache, "register_prefix", register)


def give_logits_rows_of_another_tree(patch: pytest.MonkeyPatch) -> None:
    real = step_module.assemble_pass

    def shifted(plans: Any, token_ids: Any, wanted: Any, adapters: Any) -> Any:
        arguments = real(plans, token_ids, wanted, adapters)
        has_tree = any(len(plan.parents) > 1 and len(nodes) == len(plan.parents) for plan, nodes in zip(plans, wanted, strict=True))
        if not has_tree or len(plans) == 1:
            return arguments
        return arguments._replace(logits_rows=arguments.logits_rows._replace(rows=np.roll(arguments.logits_rows.rows, len(wanted[0]))))

    patch.setattr(step_module, "assemble_pass", shifted)


def reuse_logits_processors(patch: pytest.MonkeyPatch) -> None:
    released, real_make, real_release = [], InputProcessor.make_request, Engine._release

    def release(self: Engine, request: Request) -> None:
        released.append(request)
        real_release(self, request)

    def make(self: InputProcessor, prompt: Sequence[int], params: Any, **options: Any) -> Request:
        request = real_make(self, prompt, params, **options)
        alike = replace(params, seed=0, max_tokens=1000)
        for other in released:
            if replace(other.params, seed=0, max_tokens=1000) == alike and other.finish_reason is not FinishReason.ABORT:
                request.processor = other.processor
        return request

    patch.setattr(Engine, "_release", release)
    patch.setattr(InputProcessor, "make_request", make)


def draw_every_sample_as_the_first(patch: pytest.MonkeyPatch) -> None:
    draw, sample = EditedRow.draw, CompiledBatchPathSampler.sample
    patch.setattr(EditedRow, "draw", lambda self, seed, _, position: draw(self, seed, 0, position))
    patch.setattr(
        CompiledBatchPathSampler,
        "sample",
        lambda self, requests, rows: sample(self, [one._replace(sample_index=0) for one in requests], rows),
    )


FAULTS = {
    hash_blocks_without_their_parents: PLENTY,
    let_noise_depend_on_preemptions: NUM_BLOCKS,
    evict_owned_blocks: NUM_BLOCKS,
    register_partial_blocks: PLENTY,
    give_logits_rows_of_another_tree: NUM_BLOCKS,
    reuse_logits_processors: NUM_BLOCKS,
    draw_every_sample_as_the_first: NUM_BLOCKS,
}
"""And blocks of the cache with which each is found."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_engine_faults_are_found(plant: Callable[[Any], None], faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"prompt of \d+, sample \d"):
        faulty(num_blocks=FAULTS[plant])
