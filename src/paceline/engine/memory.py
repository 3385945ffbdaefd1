"""How much memory keys and values get, and how long a context that allows."""

from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.errors import CapacityError, ConfigError
from paceline.kv_cache.paged import BLOCK_SIZE, blocks_in
from paceline.kv_cache.row_plan import blocks_for
from paceline.machine import available_memory_bytes
from paceline.models.config import ModelConfig, WeightType

_DRAFT_BLOCKS_PER_SEQUENCE = 2  # room for drafts beyond the longest a request may become


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Blocks to allocate, the longest context they serve, and a notice if that is short.

    `way_out` is what somebody can do whose prompt is longer.
    """

    num_blocks: int
    max_context: int
    way_out: str
    notice: str | None = None


def plan_cache(model: ModelConfig, config: EngineConfig, weight_type: WeightType) -> CachePlan:
    """Size the cache: what `cache_gb` says, else enough for `max_num_seqs` full contexts within a quarter of the free memory.

    Raises:
        ConfigError: `max_context` is beyond what the model was made for.
        CapacityError: `cache_gb` is too small for the context asked for, or for any.
    """
    if config.max_context is not None and config.max_context > model.max_positions:
        raise ConfigError(f"max_context is {config.max_context}, the model was made for {model.max_positions} tokens: lower max_context")
    context = config.max_context or model.max_positions
    item_bytes = 4 if weight_type is WeightType.F32 else 2
    block_bytes = model.kv_bytes_per_token(item_bytes) * BLOCK_SIZE
    per_sequence = blocks_for(context, BLOCK_SIZE) + _DRAFT_BLOCKS_PER_SEQUENCE
    wanted = config.max_num_seqs * per_sequence
    if config.cache_gb is None:
        num_blocks = min(wanted, max(1, available_memory_bytes() // 4 // block_bytes))
    else:
        num_blocks = blocks_in(int(config.cache_gb * 1e9), block_bytes)
    slots = num_blocks * BLOCK_SIZE
    if slots >= context:
        return CachePlan(num_blocks, context, _way_out(model, context))
    if config.max_context is not None:
        raise CapacityError(
            f"a context of {context} tokens needs {per_sequence * block_bytes / 1e9:.2g} GB of cache, "
            f"{num_blocks * block_bytes / 1e9:.2g} GB are to be had: lower max_context or raise cache_gb"
        )
    notice = f"the cache limits the context to {slots} of the model's {context} tokens: raise cache_gb"
    return CachePlan(num_blocks, slots, "shorten the prompt or raise cache_gb", notice)


def _way_out(model: ModelConfig, context: int) -> str:
    """For a prompt that a context of the size asked for does not hold."""
    if context < model.max_positions or model.may_grow:
        return "shorten the prompt or raise max_context"
    return f"shorten the prompt (the model was made for {model.max_positions} tokens)"
