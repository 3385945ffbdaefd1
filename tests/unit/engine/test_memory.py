"""How many blocks a cache gets, from the model, the settings and the memory of the machine."""

from dataclasses import replace

import pytest

from harness.model_configs import make_config, map_attention
from harness.recurrent_networks import MIXERS, recurrent_config
from paceline.config import EngineConfig
from paceline.engine import memory
from paceline.engine.memory import CachePlan, plan_cache
from paceline.errors import CapacityError
from paceline.kv_cache.sliding_window import PassLimits
from paceline.models.kv_cache_dtype import KVCacheDtype

FULL = make_config(num_layers=2, max_positions=100_000)
SLIDING = map_attention(FULL, window=64)
HYBRID = recurrent_config(next(iter(MIXERS.values())), None)


LIMITS = PassLimits(max_sequences=2, max_pass_rows=64)


def plan_of(config, kv_cache_gb, limits=LIMITS):
    return plan_cache(config, EngineConfig(model="", kv_cache_gb=kv_cache_gb, max_num_seqs=2), KVCacheDtype.F32, limits)


def test_sliding_window_memory_is_counted_for_running_requests_only():
    mixed = replace(FULL, layers=(FULL.layers[0], SLIDING.layers[0]))
    full, half, windows = (plan_of(config, 0.01) for config in (FULL, mixed, SLIDING))
    assert full.num_blocks < half.num_blocks < 2.01 * full.num_blocks
    assert windows.num_cache_tokens >= 100_000 > half.num_cache_tokens > full.num_cache_tokens
    assert plan_of(SLIDING, 0.01, limits=None) == full


@pytest.mark.parametrize("model", [FULL, SLIDING, HYBRID], ids=["full", "sliding", "hybrid"])
def test_kv_cache_too_small_names_a_size_that_works(model):
    size = 1e-6
    for _ in range(1 + bool(model.recurrent_layers)):  # one error for the states, one for a block
        with pytest.raises(CapacityError, match="set kv_cache_gb to at least") as refused:
            plan_of(model, size)
        size = float(str(refused.value).split()[-1])
    assert plan_of(model, size).num_blocks >= 1


# Without kv_cache_gb


GB = 10**9
LONG_TEXT = make_config(num_layers=2, max_positions=8192)
ROW_BYTES = LONG_TEXT.kv_bytes_per_token(KVCacheDtype.F32)


@pytest.fixture
def default_plan(monkeypatch: pytest.MonkeyPatch):
    """The plan of a machine with so many bytes of memory, of which so many are free."""

    def plan(model=LONG_TEXT, *, total: float = 1000 * GB, free: float = 1000 * GB, **settings: object) -> CachePlan:
        monkeypatch.setattr(memory, "total_memory_bytes", lambda: int(total))
        monkeypatch.setattr(memory, "available_memory_bytes", lambda: int(free))
        return plan_cache(model, EngineConfig(model="", **settings), KVCacheDtype.F32)

    return plan


@pytest.mark.parametrize("max_num_seqs", [1, 4, 16])
def test_default_kv_cache_holds_a_few_full_contexts(default_plan, max_num_seqs):
    plan = default_plan(max_num_seqs=max_num_seqs)
    wanted = max(min(4, max_num_seqs) * 8192, max_num_seqs * 2048)
    assert wanted <= plan.num_cache_tokens <= wanted + 64 * max_num_seqs
    assert plan.notice is None
    assert plan.num_bytes == plan.num_cache_tokens * ROW_BYTES


def test_default_kv_cache_of_a_short_context_holds_all_requests(default_plan):
    assert default_plan(make_config(num_layers=2, max_positions=512)).num_cache_tokens == 16 * (512 + 64)


@pytest.mark.parametrize("free", [1000 * GB, 1e8, 1e7, 1e6])
@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_max_model_len_does_not_depend_on_memory_or_max_num_seqs(default_plan, free, max_num_seqs):
    plan = default_plan(free=free, total=4 * free, max_num_seqs=max_num_seqs)
    assert plan.max_model_len == 8192
    assert plan.num_bytes <= free / 2
    assert (plan.notice is not None) == (plan.num_cache_tokens < 8192)


def test_default_kv_cache_takes_a_quarter_of_memory_or_half_of_free(default_plan):
    context_bytes = 8192 * ROW_BYTES
    assert 0.99 * context_bytes <= default_plan(total=4 * context_bytes).num_bytes <= context_bytes
    assert 0.99 * context_bytes <= default_plan(free=2 * context_bytes).num_bytes <= context_bytes


def test_explicit_max_model_len_takes_more_memory_if_needed(default_plan):
    context_bytes = (8192 + 64) * ROW_BYTES
    plan = default_plan(total=2 * context_bytes, free=1.5 * context_bytes, max_model_len=8192)
    assert 8192 <= plan.num_cache_tokens <= 8192 + 64
    with pytest.raises(CapacityError, match=r"a context of 8192 tokens needs .* lower max_model_len or raise kv_cache_gb"):
        default_plan(free=context_bytes, max_model_len=8192)


def test_free_memory_for_less_than_a_block_is_refused(default_plan):
    with pytest.raises(CapacityError, match="too few for a cache block"):
        default_plan(free=40 * ROW_BYTES)


def test_kv_cache_smaller_than_the_context_gives_a_notice():
    plan = plan_of(FULL, 0.01)
    assert plan.notice is not None
    assert f"the cache has room for {plan.num_cache_tokens} tokens, less than the context of 100000" in plan.notice
    assert plan.notice.endswith("raise kv_cache_gb or lower max_model_len")


def test_banner_names_the_maximum_cache_size(default_plan):
    line = default_plan(max_num_seqs=1).describe()
    assert line.startswith(f"cache: up to {8256 * ROW_BYTES / 1e9:.2g} GB (8,256 tokens, 1.01 contexts of 8,192)")
