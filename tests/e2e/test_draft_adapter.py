"""A LoRA adapter for the draft model: drafts follow the adapter, and no token changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.adapter_files import write_adapter_of
from harness.checkpoints import write_checkpoint
from paceline import LLM, CapacityError, CheckpointError, ConfigError, SamplingParams
from paceline.drafters.ngram import NgramDrafter
from paceline.models.checkpoint import read_model_config
from paceline.outputs import RequestOutput

PROMPT = "the cat sat on"
Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapter(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter_of(read_model_config(directory), tmp_path_factory.mktemp("adapters") / "support", seed=1)


@pytest.fixture(scope="module")
def open_llm(directory: Path) -> Open:
    def open_llm(**options: Any) -> LLM:
        return LLM(str(directory), **{"threads": 1, "device": "cpu", "kv_cache_gb": 0.02, "drafter": str(directory), **options})

    return open_llm


def answer(llm: LLM, temperature: float = 0.0) -> RequestOutput:
    return llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True))[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_model_with_the_adapter_of_the_target_drafts_its_tokens(
    temperature: float, open_llm: Open, adapter: Path, always_drafts: None
) -> None:
    expected = answer(open_llm(merge_adapter=adapter, drafter="none"), temperature).token_ids
    shares = []
    for draft_adapter in (None, adapter):
        llm = open_llm(merge_adapter=adapter, draft_adapter=draft_adapter)
        found = answer(llm, temperature)
        assert found.token_ids == expected
        assert ("with the adapter support" in llm.banner) == (draft_adapter is not None)
        shares.append(found.speculation.num_accepted_tokens / found.speculation.num_draft_tokens)
    assert shares[0] < 0.8
    assert shares[1] == 1.0


def test_draft_model_is_quantised_after_merging_its_adapter(open_llm: Open, adapter: Path, always_drafts: None) -> None:
    drafter: Any = open_llm(merge_adapter=adapter, draft_adapter=adapter, draft_quantization="int8").drafter
    weights = drafter.runtime.weights
    assert {weights.tensor_info(name).bits for name in weights if len(weights.tensor_info(name).shape) == 2} == {8}
    plain, adapted = (answer(open_llm(draft_adapter=one, draft_quantization="int8")) for one in (None, adapter))
    assert plain.token_ids == adapted.token_ids
    assert plain.speculation.num_accepted_tokens > adapted.speculation.num_accepted_tokens


def test_draft_adapter_without_a_draft_model_is_refused(open_llm: Open, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_adapter is 'some', and the drafter is ngram: leave it out, or name the draft model"):
        open_llm(drafter="ngram", draft_adapter="some")
    with pytest.raises(ConfigError, match="and the drafter is none"):
        open_llm(drafter="none", draft_adapter="some")
    other = write_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="draft_adapter is 'some', and there are 2 draft models"):
        open_llm(drafter=[str(directory), str(other)], draft_adapter="some")
    with pytest.raises(ConfigError, match="draft_adapter 'some' has no effect on a Drafter object"):
        open_llm(drafter=NgramDrafter(), draft_adapter="some")
    for value in ("", 3):
        with pytest.raises(ConfigError, match=f"draft_adapter is {value!r}: give the directory"):
            open_llm(draft_adapter=value)


def test_draft_adapter_of_another_model_is_refused(open_llm: Open, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"is no adapter of this model: a llama model with this config\.json does not have"):
        open_llm(drafter=str(other), draft_adapter=adapter)
    with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json"):
        open_llm(draft_adapter=other)
    monkeypatch.setattr("paceline.engine.loader.available_memory_bytes", lambda: 100)
    with pytest.raises(CapacityError, match=r"takes .* GB while it is read, 1e-07 GB are free"):
        open_llm(draft_adapter=adapter)
