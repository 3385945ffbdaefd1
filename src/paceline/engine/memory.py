"""How much memory keys and values get. The context depends on the model or `max_model_len` alone, never on the memory.

    kv_cache_gb given   as many blocks as that holds
    else             a few full contexts, within a share of the machine's memory and of what is free

Blocks are reserved, not filled: on the CPU the system provides a block's memory when a row is first written to it.
"""

from bisect import bisect_right
from dataclasses import dataclass

from paceline.config import MAX_NUM_SEQS, EngineConfig
from paceline.errors import CapacityError, ConfigError
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.kv_cache.recurrent_state import DEFAULT_CHECKPOINTS, CheckpointConfig
from paceline.kv_cache.row_plan import blocks_for
from paceline.kv_cache.sliding_window import PassLimits, num_window_blocks
from paceline.machine import available_memory_bytes, total_memory_bytes
from paceline.models.config import ModelConfig
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.state_layout import StateLayout

DEFAULT_CONTEXTS = 4
"""Full contexts that the cache holds where `kv_cache_gb` is not given."""
DEFAULT_TOKENS_PER_SEQUENCE = 2048
"""Tokens that it then holds at least of each request that may run, where the context is that long."""

_DRAFT_BLOCKS_PER_SEQUENCE = 2  # room for drafts beyond the longest a request may become
_RECORDS_PER_SEQUENCE = 32  # rows of a tree and those committed before it, of layers with a state
_MAX_KEPT_STATES = 64


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of a cache.

    Attributes:
        num_blocks: to allocate.
        max_model_len: prompt and output of a request, at most.
        way_out: for the error of a prompt that is longer.
        num_bytes: that the cache may take, states of recurrent layers included.
        notice: on what does not fit; None = everything does.
        states: how many states of recurrent layers are kept, and where.
        max_num_seqs: requests that there are states for; no more can run at a time.
    """

    num_blocks: int
    max_model_len: int
    way_out: str
    num_bytes: int = 0
    notice: str | None = None
    checkpoints: CheckpointConfig = DEFAULT_CHECKPOINTS
    max_num_seqs: int = MAX_NUM_SEQS

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit in the cache, for all requests together."""
        return self.num_blocks * BLOCK_SIZE

    def describe(self) -> str:
        """One line on the size, for the user."""
        contexts = f"{self.num_tokens / self.max_model_len:.3g} contexts of {self.max_model_len:,}"
        return f"cache: up to {self.num_bytes / 1e9:.2g} GB ({self.num_tokens:,} tokens, {contexts}), memory is taken as it is used"


def plan_cache(
    model: ModelConfig, config: EngineConfig, kv_cache_dtype: KVCacheDtype, limits: PassLimits | None = None, num_sets: int = 1
) -> CachePlan:
    """Size the cache: `kv_cache_gb`, else `DEFAULT_CONTEXTS` full contexts within what `_default_bytes` allows.

    Args:
        kv_cache_dtype: of the keys and values.
        limits: as `Network.new_cache` gets them; None = layers with a window keep every row.
        num_sets: of keys and values: 2 where scaling passes keep theirs.

    Raises:
        ConfigError: `max_model_len` is beyond what the model was made for.
        CapacityError: there is no room for one block, or for one context although `max_model_len` is given.
    """
    if config.max_model_len is not None and config.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was made for {model.max_positions} tokens: lower max_model_len"
        )
    context = config.max_model_len or model.max_positions
    cache_bytes = _CacheBytes(model, kv_cache_dtype, limits, num_sets)
    per_context = blocks_for(context, BLOCK_SIZE) + _DRAFT_BLOCKS_PER_SEQUENCE
    limit = int(config.kv_cache_gb * 1e9) if config.kv_cache_gb is not None else _default_bytes(config, cache_bytes(per_context))
    states, max_num_seqs, state_bytes = _plan_states(model, config, limit)
    available, block_bytes = limit - state_bytes, cache_bytes(1)
    if available < block_bytes:
        raise CapacityError(
            f"a cache of {available / 1e9:.2g} GB holds no block of {block_bytes} bytes: raise kv_cache_gb above {block_bytes / 1e9:.2g}"
        )
    if config.kv_cache_gb is None:
        wanted = _default_blocks(context, config.max_num_seqs)
    else:
        wanted = cache_bytes.most_in(available, config.max_num_seqs * per_context)
    num_blocks = cache_bytes.blocks_in(available, most=wanted)
    num_tokens = num_blocks * BLOCK_SIZE
    if num_tokens < context and config.max_model_len is not None:
        raise CapacityError(
            f"a context of {context} tokens needs {cache_bytes(per_context) / 1e9:.2g} GB of cache, "
            f"{cache_bytes(num_blocks) / 1e9:.2g} GB are to be had: lower max_model_len or raise kv_cache_gb"
        )
    notices = _notices(context, num_tokens, max_num_seqs, config.max_num_seqs)
    num_bytes = cache_bytes(num_blocks) + state_bytes
    return CachePlan(num_blocks, context, _way_out(model, context), num_bytes, "; ".join(notices) or None, states, max_num_seqs)


def _default_bytes(config: EngineConfig, context_bytes: int) -> int:
    """Bytes that the cache may take: a quarter of the machine's memory and half of what is free, so that it can be filled.

    One context of a length that the user gave may take three quarters of what is free.
    """
    free = available_memory_bytes()
    allowed = min(total_memory_bytes() // 4, free // 2)
    return allowed if config.max_model_len is None else max(allowed, min(context_bytes, free // 4 * 3))


def _default_blocks(context: int, max_num_seqs: int) -> int:
    """Blocks of a few contexts, and of a part of each request that may run."""
    per_sequence = min(context, DEFAULT_TOKENS_PER_SEQUENCE)
    of_contexts, of_sequences = (
        count * (blocks_for(length, BLOCK_SIZE) + _DRAFT_BLOCKS_PER_SEQUENCE)
        for count, length in ((min(DEFAULT_CONTEXTS, max_num_seqs), context), (max_num_seqs, per_sequence))
    )
    return max(of_contexts, of_sequences)


def _notices(context: int, num_tokens: int, max_num_seqs: int, wanted_num_seqs: int) -> list[str]:
    """Lines on what the cache does not hold."""
    found = []
    if num_tokens < context:
        found.append(
            f"the cache holds {num_tokens} tokens, less than the context of {context}: longer prompts are refused, longer outputs end "
            "there; raise kv_cache_gb or lower max_model_len"
        )
    if max_num_seqs < wanted_num_seqs:
        found.append(
            f"the states of recurrent layers leave room for {max_num_seqs} of {wanted_num_seqs} requests at a time: raise kv_cache_gb"
        )
    return found


def _plan_states(model: ModelConfig, config: EngineConfig, num_bytes: int) -> tuple[CheckpointConfig, int, int]:
    """How the states of recurrent layers are used, the texts that may run, and bytes.

    Those of running texts get half of the cache, and others a quarter of what is left.

    Raises:
        CapacityError: there is no room for one text's.
    """
    layout = StateLayout.of(model.recurrents)
    of_state, of_text = 4 * layout.state_size, 4 * (layout.state_size + _RECORDS_PER_SEQUENCE * layout.record_size)
    if of_state == 0:
        return CheckpointConfig(interval=config.checkpoint_interval, max_checkpoints=0), config.max_num_seqs, 0
    least = of_state + of_text  # and one that a prompt's chunk is bringing forward
    if least > num_bytes:
        raise CapacityError(
            f"the state of recurrent layers takes {least / 1e9:.2g} GB for one text, {num_bytes / 1e9:.2g} GB of cache are to be had: "
            "raise kv_cache_gb"
        )
    count = min(config.max_num_seqs, max(1, (num_bytes // 2 - of_state) // of_text))
    running = of_state + count * of_text
    kept = min(_MAX_KEPT_STATES, (num_bytes - running) // 4 // of_state) if config.enable_prefix_caching else 0
    return CheckpointConfig(interval=config.checkpoint_interval, max_checkpoints=kept), count, running + kept * of_state


class _CacheBytes:
    """Bytes of a cache by its number of blocks.

    Args:
        limits: what layers with a window have memory for; None = for every block.
        num_sets: how often keys and values are kept.
    """

    def __init__(self, model: ModelConfig, kv_cache_dtype: KVCacheDtype, limits: PassLimits | None, num_sets: int) -> None:
        self._block_bytes: dict[int | None, int] = {}
        for group in model.kv_groups():
            row_bytes = num_sets * group.bytes_per_token(kv_cache_dtype)
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
        return num_blocks if window is None else num_window_blocks(window, num_blocks, self._limits, BLOCK_SIZE)


def _way_out(model: ModelConfig, context: int) -> str:
    """For a prompt that a context of the size asked for does not hold."""
    if context < model.max_positions or model.may_grow:
        return "shorten the prompt or raise max_model_len"
    return f"shorten the prompt (the model was made for {model.max_positions} tokens)"
