"""Promise 1 for every type of keys and values: a text is the same, whatever is drafted, in whatever passes, also across splits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.always_drafts import draft_always
from harness.answer_drafters import ChaosDrafter
from harness.checkpoints import write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.expert_checkpoints import CASES as EXPERTS
from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.speculation.drafter import Drafter

BY_TYPE = pytest.mark.parametrize("kv_cache_dtype", [one.value for one in KVCacheDtype])
LENGTHS = (251, 40, 507)  # outputs continue across the ends of splits, at 256 and 512 positions
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True, seed=3)
FREE = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=3)
Outputs = list[Sequence[int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_kernels()
    return write_checkpoint(tmp_path_factory.mktemp("kv"), "llama", max_position_embeddings=2048)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


def open_llm(directory: Path, kv_cache_dtype: str, drafter: str | Drafter = "none", **options: Any) -> LLM:
    given = {"threads": 1, "device": "cpu", "backend": "native", "kv_cache_gb": 0.02, **options}
    return LLM(str(directory), drafter=drafter, kv_cache_dtype=kv_cache_dtype, **given)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(1, 90, length).tolist() for length in LENGTHS]


def answers(directory: Path, kv_cache_dtype: str, params: SamplingParams, drafter: str | Drafter = "none", **options: Any) -> Outputs:
    """The output tokens of each prompt, all in one engine, and again with the prefixes that it has cached."""
    with open_llm(directory, kv_cache_dtype, drafter, **{"threads": 2, "max_model_len": 700, **options}) as llm:
        found = llm.generate(prompts(), params)
        again = llm.generate(prompts(), params)
    assert [one.token_ids for one in again] == [one.token_ids for one in found]
    return [one.token_ids for one in found]


@pytest.mark.spread(0.5)
@BY_TYPE
@pytest.mark.parametrize("params", [GREEDY, FREE], ids=["greedy", "sampled"])
def test_kv_cache_dtype_text_is_equal_with_and_without_drafts(
    kv_cache_dtype: str, params: SamplingParams, directory: Path, drafting: None
) -> None:
    check_drafts_change_nothing(directory, kv_cache_dtype, params)


@pytest.mark.spread(0.34)
@pytest.mark.parametrize("kv_cache_dtype", ["f32", "bf16", "f16"])
def test_text_from_cached_latents_is_equal_with_and_without_drafts(kv_cache_dtype: str, tmp_path: Path, drafting: None) -> None:
    """Multi-head latent attention; int8 is refused."""
    skip_without_kernels()
    family, values = EXPERTS["deepseek_v3"]
    directory = write_checkpoint(tmp_path / "latent", family, **{**values, "max_position_embeddings": 2048})
    check_drafts_change_nothing(directory, kv_cache_dtype, FREE)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'int8', which latent attention \(MLA\) does not support"):
        answers(directory, "int8", GREEDY)


def check_drafts_change_nothing(directory: Path, kv_cache_dtype: str, params: SamplingParams) -> None:
    plain = answers(directory, kv_cache_dtype, params, threads=1, max_num_seqs=1)
    known = {(tuple(prompt), params.seed): answer for prompt, answer in zip(prompts(), plain, strict=True)}
    assert answers(directory, kv_cache_dtype, params, "ngram", prefill_chunk_size=64) == plain
    chaos, options = ChaosDrafter(known, 96, seed=2), {"threads": 1, "tree_width": 3, "enable_prefix_caching": False}
    assert answers(directory, kv_cache_dtype, params, chaos, **options) == plain


@pytest.mark.spread(0.5)
@BY_TYPE
def test_long_context_text_is_equal_with_drafts(kv_cache_dtype: str, tmp_path: Path, large_counts: bool, drafting: None) -> None:
    """Its prompt token by token, in chunks, and found again; plainly and with drafts; two of them in one batch."""
    length = 8190 if large_counts else 1100
    model = write_checkpoint(tmp_path / "long", "llama", max_position_embeddings=9000, num_hidden_layers=2)
    random = np.random.default_rng(5)
    texts = [random.integers(1, 90, length - 700 * number).tolist() for number in range(2)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=4, logprobs=3)

    def outputs(drafter: str | Drafter, repeats: int = 1, **options: Any) -> list[Any]:
        given = {"threads": 2, "max_model_len": length + 64, "kv_cache_gb": 0.05, **options}
        with open_llm(model, kv_cache_dtype, drafter, **given) as llm:
            found = [llm.generate(texts, params) for _ in range(repeats)]
        return [[(one.token_ids, one.logprobs) for one in answers] for answers in found]

    (plain,) = outputs("none", threads=1, max_num_seqs=1, prefill_chunk_size=1)
    known = {(tuple(text), params.seed): answer[0] for text, answer in zip(texts, plain, strict=True)}
    assert outputs("none", enable_prefix_caching=False) == [plain]
    assert outputs("ngram", repeats=2, prefill_chunk_size=200) == [plain, plain]
    assert outputs(ChaosDrafter(known, 96, seed=2), threads=1, tree_width=3) == [plain]


def test_kv_cache_dtypes_give_different_logprobs(directory: Path) -> None:
    """So the comparisons above would see rows that are not read as they are stored."""
    found = {}
    for kv_cache_dtype in ("f32", "bf16", "f16", "int8"):
        with open_llm(directory, kv_cache_dtype) as llm:
            outputs = llm.generate(prompts(), SamplingParams(max_tokens=1, logprobs=1))
        found[kv_cache_dtype] = [one.logprobs[0].logprob for one in outputs if one.logprobs is not None]
    assert len({tuple(values) for values in found.values()}) == 4
    for values in found.values():
        assert np.abs(np.array(values) - np.array(found["f32"])).max() < 0.2


def test_cache_capacity_follows_kv_cache_dtype(directory: Path) -> None:
    slots = {}
    for kv_cache_dtype in KVCacheDtype:
        with open_llm(directory, kv_cache_dtype.value, kv_cache_gb=0.001) as llm:
            slots[kv_cache_dtype] = llm.engine.cache.max_slots
            assert llm.engine.cache.num_bytes <= 1e6
    assert slots[KVCacheDtype.BF16] == slots[KVCacheDtype.F16] >= 2 * slots[KVCacheDtype.F32]
    assert slots[KVCacheDtype.INT8] > 1.5 * slots[KVCacheDtype.F16]  # scales take as much as 4 of the 16 columns


def test_torch_backend_refuses_another_kv_cache_dtype_than_its_own(directory: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is 'int8', torch keeps .* 'f32': leave kv_cache_dtype out, or use backend='native'"
    ):
        LLM(str(directory), drafter="none", kv_cache_dtype="int8", device="cpu", backend="torch")
    LLM(str(directory), drafter="none", kv_cache_dtype="f32", device="cpu", backend="torch").close()
