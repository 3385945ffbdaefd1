"""EAGLE heads in the engine: rows that a head has not seen, short contexts, failures. tests/exact has the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.always_drafts import set_drafters
from harness.checkpoints import write_checkpoint, write_tokenizer
from harness.eagle_checkpoints import (
    DRAFT_IDS,
    EAGLE1,
    FIRST_TOKEN,
    eagle1_tensors,
    write_head,
    write_legible_target,
    write_listening_eagle1,
    write_reading_eagle1,
    write_reading_eagle3,
)
from paceline import LLM, SamplingParams
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter
from paceline.errors import IncompatibleDrafterError
from paceline.outputs import RequestOutput
from paceline.runtimes.native.library import kernels_path
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.stats import SkipReason

NUM_TOKENS, DEPTH = 61, 4
PERFECT_STEPS = 1 + (NUM_TOKENS - 1) // (DEPTH + 1)  # the prompt's own, then DEPTH + 1 tokens each
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=3)
SMALL_CACHE_GB = 16 * 2 * 4 * 3 * 32 * 24 * 4 / 1e9  # 16 blocks of the legible targets
Head = tuple[Path, Path]
Heads = Callable[[str], Head]
WRITERS = {"listening": write_listening_eagle1, "reading": write_reading_eagle1, "reading 3": write_reading_eagle3}

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """A target and a head for it."""
    folder = tmp_path_factory.mktemp("eagle")
    targets = {reads: write_legible_target(folder / f"target-{reads}", reads_mean=reads) for reads in (True, False)}
    written: dict[str, Path] = {}

    def head(name: str) -> Head:
        kind = name.removesuffix(" swapped")
        if name not in written:
            written[name] = WRITERS[kind](folder / name, swapped=name.endswith("swapped"))
        return targets[kind == "listening"], written[name]

    return head


def open_llm(head: Head, *, depth: int = DEPTH, max_rows: int | None = None, **options: object) -> LLM:
    target, files = head
    given = {"backend": "native", "threads": 1, "max_model_len": 512, "kv_cache_gb": 0.05, **options}
    llm = LLM(str(target), drafter=str(files), num_speculative_tokens=depth, **given)  # type: ignore[arg-type]
    llm.engine.speculator.policy = FixedDraftLength(depth, max_rows=max_rows)
    return llm


def drafter_of(llm: LLM) -> EagleStyleDrafter:
    assert isinstance(llm.drafter, EagleStyleDrafter)
    return llm.drafter


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[FIRST_TOKEN, *random.choice(DRAFT_IDS, length - 1).tolist()] for length in lengths]


class PlainTargets:
    """Outputs of targets without drafts; each is opened and run once."""

    def __init__(self) -> None:
        self._llms: dict[Path, LLM] = {}
        self._answers: dict[tuple[Path, tuple[int, ...], SamplingParams], list[int]] = {}

    def __call__(self, head: Head, texts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
        target = head[0]
        if target not in self._llms:
            self._llms[target] = LLM(
                str(target), drafter="none", backend="native", threads=1, max_model_len=512, enable_prefix_caching=False
            )
        for text in texts:
            if (target, tuple(text), params) not in self._answers:
                self._answers[target, tuple(text), params] = self._llms[target].generate([text], params)[0].token_ids
        return [self._answers[target, tuple(text), params] for text in texts]


@pytest.fixture(scope="module")
def plain() -> PlainTargets:
    return PlainTargets()


def generate_without_head(llm: LLM, text: list[int]) -> None:
    """Leaves rows in the cache that the head never saw."""
    speculator = llm.engine.speculator
    set_drafters(llm)
    llm.generate([text], GREEDY)
    llm.engine.speculator = speculator


def check(llm: LLM) -> None:
    llm.engine.cache.check_consistency()
    assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_blocks


def assert_perfect(outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        assert output.speculation.acceptance_rate == 1.0, output.speculation
        assert output.speculation.steps == PERFECT_STEPS


def test_eagle_skips_a_cached_prefix_that_ran_without_the_head(heads: Heads, plain: PlainTargets) -> None:
    """Rows that ran without the head: it drafts from the rows after them, at the right positions."""
    for name, is_perfect in (("reading", True), ("reading 3", True), ("listening", False)):
        llm = open_llm(heads(name))
        (text,) = prompts(100)
        (expected,) = plain(heads(name), [text])
        generate_without_head(llm, text)  # the prompt is in the target's cache, but not in the head's
        seen: list[int] = []
        pairs = drafter_of(llm).pair_cache
        keep = pairs.mark_computed
        pairs.mark_computed = lambda request, ids: (keep(request, ids), seen.append(pairs._slots[request].first_slot))[0]  # type: ignore[method-assign]  # noqa: B023
        (output,) = llm.generate([text], GREEDY)
        assert output.token_ids == expected
        assert output.usage.num_cached_tokens == 96
        assert set(seen) == {97}
        assert (output.speculation.acceptance_rate == 1.0) == is_perfect


def test_eagle_skips_reused_blocks_that_ran_without_the_head(heads: Heads, plain: PlainTargets, large_counts: bool) -> None:
    """A cache so small that blocks change hands, some of them with the head off."""
    llm = open_llm(heads("listening"), kv_cache_gb=SMALL_CACHE_GB, max_model_len=256)
    texts = [text for seed in range(5 if large_counts else 3) for text in prompts(40, 65, 97, seed=seed)]
    for number, text in enumerate(texts + texts[::-1]):
        if number % 3 == 2:
            generate_without_head(llm, text)
            continue
        (output,) = llm.generate([text], GREEDY)
        if output.usage.num_cached_tokens == 0:
            assert output.speculation.acceptance_rate == 1.0
        assert output.token_ids == plain(heads("listening"), [text])[0]
    assert llm.engine.cache.prefix_stats.num_evicted_blocks > 20
    check(llm)


def test_eagle_drafts_follow_penalties_over_draft_tokens(heads: Heads, plain: PlainTargets) -> None:
    params = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4)
    llm = open_llm(heads("reading"))
    texts = prompts(33, 50)
    outputs = llm.generate(texts, params)
    assert [output.token_ids for output in outputs] == plain(heads("reading"), texts, params)
    assert_perfect(outputs)


def test_eagle_text_beyond_the_head_context_uses_its_last_tokens(heads: Heads, plain: PlainTargets, tmp_path: Path) -> None:
    files = write_reading_eagle1(tmp_path / "short", max_positions=40)
    llm = open_llm((heads("reading")[0], files))
    assert "sees the last 40 tokens" in drafter_of(llm).traits.description
    (output,) = llm.generate(prompts(150), GREEDY)
    assert output.token_ids == plain(heads("reading"), prompts(150))[0]
    assert_perfect([output])


def test_failing_eagle_pass_causes_plain_steps(heads: Heads, plain: PlainTargets, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(heads("listening"))
    drafter = drafter_of(llm)
    real, calls = drafter.head.runtime.forward, [0]

    def sometimes(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] % 5 == 3:
            raise RuntimeError("no luck")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter.head.runtime, "forward", sometimes)
    texts = prompts(40, 90)
    outputs = llm.generate(texts, GREEDY)
    assert [output.token_ids for output in outputs] == plain(heads("listening"), texts)
    assert sum(output.speculation.skip_counts[SkipReason.DRAFTER_FAILED] for output in outputs) > 3
    check(llm)


def test_eagle_head_loaded_for_another_target_is_refused(heads: Heads, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleDrafterError, match="boundaries"):
        open_llm((heads("reading 3")[0], write_reading_eagle3(tmp_path / "deep", eagle_aux_hidden_state_layer_ids=[2, 4, 9])))


def test_eagle_head_with_fewer_embeddings_than_tokens_is_refused(tmp_path: Path) -> None:
    """If the text ends within the padding after them, only ids with an embedding are drafted."""
    target = write_checkpoint(tmp_path / "target", "llama")
    write_tokenizer(target, vocab_size=80)  # of 97 rows
    for rows in (79, 80):
        spec = {**EAGLE1, "hidden_size": 64, "head_dim": 16, "vocab_size": rows}
        files = write_head(tmp_path / f"head-{rows}", spec, eagle1_tensors(spec))
        if rows == 79:
            with pytest.raises(IncompatibleDrafterError, match="has embeddings of 79 token ids, the target's tokenizer has 80"):
                open_llm((target, files))
    alone = LLM(str(target), drafter="none", backend="native", threads=1, max_model_len=512, kv_cache_gb=0.05, enable_prefix_caching=False)
    texts = [np.random.default_rng(seed).integers(1, 80, 20).tolist() for seed in range(3)]
    for max_rows, width in ((None, 1), (13, 3)):
        llm = open_llm((target, files), max_rows=max_rows, tree_width=width)
        for params in (GREEDY, SAMPLED, replace(SAMPLED, top_k=50)):
            expected = [alone.generate([text], params)[0].token_ids for text in texts]
            assert [output.token_ids for output in llm.generate(texts, params)] == expected
            assert [llm.generate([text], params)[0].token_ids for text in texts] == expected
        assert llm.stats().drafter_failures == 0
        check(llm)


def test_eagle_head_with_a_window_of_one_still_drafts_right(heads: Heads, plain: PlainTargets, tmp_path: Path) -> None:
    """The reading head hears the current pair alone, so a window changes nothing but what is looked at: one of one pair stays right."""
    files = write_reading_eagle1(tmp_path / "windowed", layer_types=["sliding_attention"], sliding_window=1)
    for max_rows, width in ((None, 1), (13, 3)):
        llm = open_llm((heads("reading")[0], files), max_rows=max_rows, tree_width=width)
        assert drafter_of(llm).head.config.layers.attention.window == 1
        outputs = llm.generate(prompts(40, 70), GREEDY)
        assert [output.token_ids for output in outputs] == plain(heads("reading"), prompts(40, 70))
        assert width > 1 or all(output.speculation.acceptance_rate == 1.0 for output in outputs)
        check(llm)
