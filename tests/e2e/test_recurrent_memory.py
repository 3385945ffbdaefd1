"""What models with recurrent layers take memory for: states of running texts and, of rows that may yet be dropped, records."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.hybrid_checkpoints import CASES
from paceline import LLM, CapacityError, SamplingParams
from paceline.kv_cache.recurrent_state import MIN_PREFILL_ROWS_WITHOUT_RECORDS, RecurrentStateCache
from paceline.speculation.draft_length.policy import FixedDraftLength

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_kernels()
    family, values = CASES["qwen3_5"]
    return write_checkpoint(tmp_path_factory.mktemp("hybrid"), family, **values)


def test_recurrent_state_records_of_long_prompts_are_bounded(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, real = [], RecurrentStateCache._allocate_records
    monkeypatch.setattr(
        RecurrentStateCache, "_allocate_records", lambda memory, text, count: counts.append(count) or real(memory, text, count)
    )
    llm = LLM(str(hybrid), drafter=str(hybrid), num_speculative_tokens=4, max_model_len=512, kv_cache_gb=0.1, dtype="f32", threads=1)
    llm.engine.speculator.policy = FixedDraftLength(4)  # it always drafts
    counts.clear()
    prompt = np.random.default_rng(0).integers(1, llm.vocab_size, 480).tolist()
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.speculation.num_accepted_tokens > 0
    assert max(counts) < MIN_PREFILL_ROWS_WITHOUT_RECORDS


def test_recurrent_state_memory_limits_running_requests(hybrid: Path) -> None:
    options: dict[str, Any] = {"drafter": "none", "max_model_len": 128, "dtype": "f32", "threads": 1}
    plain = LLM(str(hybrid), **options, kv_cache_gb=0.1)
    assert plain.engine.scheduler.limits.max_num_seqs == 16
    assert not [line for line in plain.notices if "recurrent" in line]
    llm = LLM(str(hybrid), **options, kv_cache_gb=0.004)
    count = llm.engine.scheduler.limits.max_num_seqs
    assert 1 <= count < 16
    assert any(f"leave room for {count} of 16 requests at a time: raise kv_cache_gb" in line for line in llm.notices)
    prompts = [[3 + number, 5, 7] for number in range(20)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    found = [output.token_ids for output in llm.generate(prompts, params)]
    assert found == [output.token_ids for output in plain.generate(prompts, params)]
    with pytest.raises(CapacityError, match="too few for the state of recurrent layers: set kv_cache_gb to at least"):
        LLM(str(hybrid), **options, kv_cache_gb=0.00001)
