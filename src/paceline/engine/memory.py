"""How much memory keys and values get, and how long a context that allows."""

from bisect import bisect_right
from dataclasses import dataclass

from paceline.config import MAX_NUM_SEQS, EngineConfig
from paceline.errors import CapacityError, ConfigError
from paceline.kv_cache.paged import BLOCK_SIZE, blocks_in
from paceline.kv_cache.recurrent import DEFAULT_STATES, StateLimits
from paceline.kv_cache.row_plan import blocks_for
from paceline.kv_cache.window import PassLimits, window_blocks
from paceline.machine import available_memory_bytes
from paceline.models.config import ModelConfig
from paceline.models.kv_type import KVType
from paceline.models.state_layout import StateLayout

_DRAFT_BLOCKS_PER_SEQUENCE = 2  # room for drafts beyond the longest a request may become
_RECORDS_PER_SEQUENCE = 32  # rows of a tree and those committed before it, of layers with a state
_MOST_KEPT_STATES = 64


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Blocks to allocate, the longest context they serve, and a notice if that is short.

    Attributes:
        way_out: what somebody can do whose prompt is longer.
        states: how those of recurrent layers are used.
        max_num_seqs: texts that there are states for; no more can run at a time.
    """

    num_blocks: int
    max_context: int
    way_out: str
    notice: str | None = None
    states: StateLimits = DEFAULT_STATES
    max_num_seqs: int = MAX_NUM_SEQS


def plan_cache(model: ModelConfig, config: EngineConfig, kv_type: KVType, limits: PassLimits | None = None, num_sets: int = 1) -> CachePlan:
    """Size the cache: what `cache_gb` says, else enough for `max_num_seqs` full contexts within a quarter of the free memory.

    Args:
        kv_type: of the keys and values.
        limits: as `Network.new_cache` gets them; None = layers with a window keep every row.
        num_sets: of keys and values: 2 where scaling passes keep theirs.

    Raises:
        ConfigError: `max_context` is beyond what the model was made for.
        CapacityError: `cache_gb` is too small for the context asked for, or for any.
    """
    if config.max_context is not None and config.max_context > model.max_positions:
        raise ConfigError(f"max_context is {config.max_context}, the model was made for {model.max_positions} tokens: lower max_context")
    context = config.max_context or model.max_positions
    cache_bytes = _CacheBytes(model, kv_type, limits, num_sets)
    per_sequence = blocks_for(context, BLOCK_SIZE) + _DRAFT_BLOCKS_PER_SEQUENCE
    wanted = config.max_num_seqs * per_sequence
    total = available_memory_bytes() // 4 if config.cache_gb is None else int(config.cache_gb * 1e9)
    states, max_num_seqs, state_bytes = _plan_states(model, config, total)
    num_bytes = total - state_bytes
    if config.cache_gb is None:
        num_blocks = max(1, cache_bytes.blocks_in(num_bytes, most=wanted))
    else:
        blocks_in(num_bytes, cache_bytes(1))
        num_blocks = cache_bytes.blocks_in(num_bytes, most=cache_bytes.most_in(num_bytes, wanted))
    slots = num_blocks * BLOCK_SIZE
    few = None
    if max_num_seqs < config.max_num_seqs:
        few = f"the states of recurrent layers leave room for {max_num_seqs} of {config.max_num_seqs} requests at a time: raise cache_gb"
    if slots >= context:
        return CachePlan(num_blocks, context, _way_out(model, context), few, states, max_num_seqs)
    if config.max_context is not None:
        raise CapacityError(
            f"a context of {context} tokens needs {cache_bytes(per_sequence) / 1e9:.2g} GB of cache, "
            f"{cache_bytes(num_blocks) / 1e9:.2g} GB are to be had: lower max_context or raise cache_gb"
        )
    notice = f"the cache limits the context to {slots} of the model's {context} tokens: raise cache_gb"
    notice = notice if few is None else f"{notice}; {few}"
    return CachePlan(num_blocks, slots, "shorten the prompt or raise cache_gb", notice, states, max_num_seqs)


def _plan_states(model: ModelConfig, config: EngineConfig, num_bytes: int) -> tuple[StateLimits, int, int]:
    """How the states of recurrent layers are used, the texts that may run, and bytes.

    Those of running texts get half of the cache, and others a quarter of what is left.

    Raises:
        CapacityError: there is no room for one text's.
    """
    layout = StateLayout.of(model.recurrents)
    of_state, of_text = 4 * layout.state_size, 4 * (layout.state_size + _RECORDS_PER_SEQUENCE * layout.record_size)
    if of_state == 0:
        return StateLimits(stride=config.state_stride, max_kept=0), config.max_num_seqs, 0
    least = of_state + of_text  # and one that a prompt's chunk is bringing forward
    if least > num_bytes:
        raise CapacityError(
            f"the state of recurrent layers takes {least / 1e9:.2g} GB for one text, {num_bytes / 1e9:.2g} GB of cache are to be had: "
            "raise cache_gb"
        )
    count = min(config.max_num_seqs, max(1, (num_bytes // 2 - of_state) // of_text))
    running = of_state + count * of_text
    kept = min(_MOST_KEPT_STATES, (num_bytes - running) // 4 // of_state) if config.prefix_cache else 0
    return StateLimits(stride=config.state_stride, max_kept=kept), count, running + kept * of_state


class _CacheBytes:
    """Bytes of a cache by its number of blocks.

    Args:
        limits: what layers with a window have memory for; None = for every block.
        num_sets: how often keys and values are kept.
    """

    def __init__(self, model: ModelConfig, kv_type: KVType, limits: PassLimits | None, num_sets: int) -> None:
        self._block_bytes: dict[int | None, int] = {}
        for group in model.kv_groups():
            row_bytes = num_sets * group.bytes_per_token(kv_type)
            self._block_bytes[group.window] = self._block_bytes.get(group.window, 0) + row_bytes * BLOCK_SIZE
        self._limits = limits

    def __call__(self, num_blocks: int) -> int:
        counts = {window: self._count(window, num_blocks) for window in self._block_bytes}
        return sum(count * self._block_bytes[window] for window, count in counts.items())

    def blocks_in(self, num_bytes: int, *, most: int) -> int:
        """Blocks that fit `num_bytes`."""
        return bisect_right(range(1, most + 1), num_bytes, key=self)

    def most_in(self, num_bytes: int, wanted: int) -> int:
        """More than fit; where no layer sees the whole text any number may, and those that are wanted are enough."""
        of_whole_text = self._block_bytes.get(None, 0) if self._limits else self(1)
        return max(wanted, num_bytes // of_whole_text) if of_whole_text else wanted

    def _count(self, window: int | None, num_blocks: int) -> int:
        return num_blocks if window is None else window_blocks(window, num_blocks, self._limits, BLOCK_SIZE)


def _way_out(model: ModelConfig, context: int) -> str:
    """For a prompt that a context of the size asked for does not hold."""
    if context < model.max_positions or model.may_grow:
        return "shorten the prompt or raise max_context"
    return f"shorten the prompt (the model was made for {model.max_positions} tokens)"
