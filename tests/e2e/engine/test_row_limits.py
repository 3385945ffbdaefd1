"""A pass never has more rows than `max_num_batched_tokens`, whatever prompts, drafts and grammars need; drafters run in parts."""

from pathlib import Path
from typing import Any

import pytest

from harness.engine_targets import record_rows
from paceline import LLM, ConfigError, Grammar, SamplingParams
from paceline.config import MAX_PASS_ROWS, EngineConfig
from paceline.drafters.draft_model import PREFILL_CHUNK_TOKENS
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.stats import SkipReason


def test_draft_model_prefills_prompts_larger_than_one_pass(mini_dir: Path) -> None:
    prompts = [[100 + index] * 240 for index in range(1 + MAX_PASS_ROWS // 240)]
    llm = LLM(
        str(mini_dir), drafter="draft_model", max_num_seqs=32, max_num_batched_tokens=4096, max_model_len=300, kv_cache_gb=0.5, threads=2
    )
    llm.engine.speculator.policy = FixedDraftLength(2)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    assert PREFILL_CHUNK_TOKENS > 240
    assert llm.stats().drafter_failures == 0
    assert llm.stats().num_preemptions == 0
    assert all(output.speculation.num_draft_tokens > 0 for output in outputs)


def plan_nothing(batch: Any, drafter: Any, max_rows: int | None) -> None:
    for rows in batch:
        rows.skip_drafter(SkipReason.UNPROFITABLE)


@pytest.mark.spread(0.6)
@pytest.mark.parametrize("max_num_batched_tokens", [3, 7, 20])
def test_forced_grammar_tokens_fit_max_num_batched_tokens(
    mini_dir: Path, max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced tokens are drafted also for requests whose drafting does not pay."""
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=40, grammar=Grammar.choice(["the whole of this long sentence is forced, to its very end."]))
    prompts = ["One: ", "Two: ", "Three: "]
    plain = LLM(str(mini_dir), drafter="none", max_model_len=300, kv_cache_gb=0.1, threads=2).generate(prompts, params)
    llm = LLM(str(mini_dir), drafter="ngram", max_num_batched_tokens=max_num_batched_tokens, max_model_len=300, kv_cache_gb=0.1, threads=2)
    monkeypatch.setattr(llm.engine.speculator.policy, "plan_drafts", plan_nothing)
    rows = record_rows(llm, monkeypatch)
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert max(rows) <= max_num_batched_tokens
    assert (sum(output.speculation.num_accepted_tokens for output in outputs) > 20) == (max_num_batched_tokens > 3)


@pytest.mark.parametrize("name", ["prefill_chunk_size", "max_num_batched_tokens"])
def test_prefill_chunk_size_and_max_num_batched_tokens_must_be_positive(mini_dir: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        EngineConfig(**{name: 0})
