"""How many blocks a cache gets where some layers see a window."""

from dataclasses import replace

import pytest

from harness.model_configs import make_config, with_attention
from paceline.config import EngineConfig
from paceline.engine.memory import plan_cache
from paceline.errors import CapacityError
from paceline.kv_cache.window import PassLimits
from paceline.models.kv_type import KVType

FULL = make_config(num_layers=2, max_positions=100_000)
SLIDING = with_attention(FULL, window=64)


LIMITS = PassLimits(max_sequences=2, max_rows=64)


def plan_of(config, cache_gb, limits=LIMITS):
    return plan_cache(config, EngineConfig(model="", cache_gb=cache_gb, max_num_seqs=2), KVType.F32, limits)


def test_a_window_takes_what_runs_at_a_time_and_leaves_the_rest_to_longer_contexts():
    mixed = replace(FULL, layers=(FULL.layers[0], SLIDING.layers[0]))
    full, half, windows = (plan_of(config, 0.01) for config in (FULL, mixed, SLIDING))
    assert full.num_blocks < half.num_blocks < 2.01 * full.num_blocks
    assert windows.max_context == 100_000 > half.max_context > full.max_context
    assert plan_of(SLIDING, 0.01, limits=None) == full


def test_a_cache_too_small_for_one_block_is_refused():
    with pytest.raises(CapacityError, match="holds no block"):
        plan_of(SLIDING, 1e-6)
