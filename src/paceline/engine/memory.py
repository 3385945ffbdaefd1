"""Sizes the cache. The context length depends on the model or `max_model_len` only, not on memory.

    kv_cache_gb given   as many blocks as fit
    else                a few full contexts, within a share of the machine's memory and of what is free

On the CPU the system provides a block's memory when a row is first written to it.
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
"""Full contexts in the cache if `kv_cache_gb` is not given."""
DEFAULT_TOKENS_PER_SEQUENCE = 2048
"""Tokens per running request that the cache then holds at least, if the context is that long."""

_DRAFT_BLOCKS_PER_SEQUENCE = 2  # blocks for drafts beyond the maximum length of a request
_RECORDS_PER_SEQUENCE = 32  # replay records of one draft tree and of the pending rows before it
_MAX_CHECKPOINTS = 64


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of a cache.

    Attributes:
        num_blocks: number of blocks.
        max_model_len: maximum length of prompt and output of a request.
        way_out: advice in the error for a longer prompt.
        num_bytes: maximum size, states of recurrent layers included.
        notice: a warning if one context or `max_num_seqs` requests do not fit; None = everything fits.
        checkpoints: which states of recurrent layers are kept for other sequences.
        max_num_seqs: running requests that there are states for.
    """

    num_blocks: int
    max_model_len: int
    way_out: str
    num_bytes: int = 0
    notice: str | None = None
    checkpoints: CheckpointConfig = DEFAULT_CHECKPOINTS
    max_num_seqs: int = MAX_NUM_SEQS

    @property
    def num_cache_tokens(self) -> int:
        """Number of tokens that fit in the cache, of all requests together."""
        return self.num_blocks * BLOCK_SIZE

    def describe(self) -> str:
        """Return one line on the size, for the user."""
        contexts = f"{self.num_cache_tokens / self.max_model_len:.3g} contexts of {self.max_model_len:,}"
        return f"cache: up to {self.num_bytes / 1e9:.2g} GB ({self.num_cache_tokens:,} tokens, {contexts}), memory is taken as it is used"


def plan_cache(
    model: ModelConfig, config: EngineConfig, kv_cache_dtype: KVCacheDtype, limits: PassLimits | None = None, num_sets: int = 1
) -> CachePlan:
    """Size the cache: `kv_cache_gb`, else `DEFAULT_CONTEXTS` full contexts within what `_default_bytes` allows.

    Args:
        kv_cache_dtype: type of the keys and values.
        limits: as for `Network.new_cache`; None = layers with a window keep every row.
        num_sets: sets of keys and values: 2 if scaling passes have their own.

    Raises:
        ConfigError: `max_model_len` exceeds the model's maximum.
        CapacityError: not even one block fits, or not one context although `max_model_len` is given.
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
        wanted = cache_bytes.max_blocks_bound(available, config.max_num_seqs * per_context)
    num_blocks = cache_bytes.num_blocks_that_fit(available, most=wanted)
    num_cache_tokens = num_blocks * BLOCK_SIZE
    if num_cache_tokens < context and config.max_model_len is not None:
        raise CapacityError(
            f"a context of {context} tokens needs {cache_bytes(per_context) / 1e9:.2g} GB of cache, "
            f"{cache_bytes(num_blocks) / 1e9:.2g} GB are to be had: lower max_model_len or raise kv_cache_gb"
        )
    notices = _notices(context, num_cache_tokens, max_num_seqs, config.max_num_seqs)
    num_bytes = cache_bytes(num_blocks) + state_bytes
    return CachePlan(num_blocks, context, _way_out(model, context), num_bytes, "; ".join(notices) or None, states, max_num_seqs)


def _default_bytes(config: EngineConfig, context_bytes: int) -> int:
    """Return the default size: at most a quarter of the machine's memory and half of what is free.

    One context of a given `max_model_len` may take three quarters of what is free.
    """
    free = available_memory_bytes()
    allowed = min(total_memory_bytes() // 4, free // 2)
    return allowed if config.max_model_len is None else max(allowed, min(context_bytes, free // 4 * 3))


def _default_blocks(context: int, max_num_seqs: int) -> int:
    """Return the blocks of a few contexts, or of a part of each running request if that is more."""
    per_sequence = min(context, DEFAULT_TOKENS_PER_SEQUENCE)
    of_contexts, of_sequences = (
        count * (blocks_for(length, BLOCK_SIZE) + _DRAFT_BLOCKS_PER_SEQUENCE)
        for count, length in ((min(DEFAULT_CONTEXTS, max_num_seqs), context), (max_num_seqs, per_sequence))
    )
    return max(of_contexts, of_sequences)


def _notices(context: int, num_cache_tokens: int, max_num_seqs: int, requested_num_seqs: int) -> list[str]:
    """Return warnings about what does not fit in the cache."""
    found = []
    if num_cache_tokens < context:
        found.append(
            f"the cache holds {num_cache_tokens} tokens, less than the context of {context}: longer prompts are refused, longer outputs "
            "end there; raise kv_cache_gb or lower max_model_len"
        )
    if max_num_seqs < requested_num_seqs:
        found.append(
            f"the states of recurrent layers leave room for {max_num_seqs} of {requested_num_seqs} requests at a time: raise kv_cache_gb"
        )
    return found


def _plan_states(model: ModelConfig, config: EngineConfig, num_bytes: int) -> tuple[CheckpointConfig, int, int]:
    """Return the checkpoints of recurrent states, the number of requests that may run, and the bytes of both.

    States of running requests get half of the cache, checkpoints a quarter of the rest.

    Raises:
        CapacityError: the states of one request do not fit.
    """
    layout = StateLayout.for_layers(model.recurrent_layers)
    state_bytes, request_bytes = 4 * layout.state_size, 4 * (layout.state_size + _RECORDS_PER_SEQUENCE * layout.record_size)
    if state_bytes == 0:
        return CheckpointConfig(interval=config.state_interval, max_checkpoints=0), config.max_num_seqs, 0
    least = state_bytes + request_bytes  # a prefill chunk needs memory for a second state
    if least > num_bytes:
        raise CapacityError(
            f"the state of recurrent layers takes {least / 1e9:.2g} GB for one text, {num_bytes / 1e9:.2g} GB of cache are to be had: "
            "raise kv_cache_gb"
        )
    count = min(config.max_num_seqs, max(1, (num_bytes // 2 - state_bytes) // request_bytes))
    running = state_bytes + count * request_bytes
    kept = min(_MAX_CHECKPOINTS, (num_bytes - running) // 4 // state_bytes) if config.enable_prefix_caching else 0
    return CheckpointConfig(interval=config.state_interval, max_checkpoints=kept), count, running + kept * state_bytes


class _CacheBytes:
    """Computes the bytes of a cache with a given number of blocks; arguments as for `plan_cache`."""

    def __init__(self, model: ModelConfig, kv_cache_dtype: KVCacheDtype, limits: PassLimits | None, num_sets: int) -> None:
        self._block_bytes: dict[int | None, int] = {}
        for group in model.kv_groups():
            row_bytes = num_sets * group.bytes_per_token(kv_cache_dtype)
            self._block_bytes[group.window] = self._block_bytes.get(group.window, 0) + row_bytes * BLOCK_SIZE
        self._limits = limits

    def __call__(self, num_blocks: int) -> int:
        counts = {window: self._num_blocks_with_window(window, num_blocks) for window in self._block_bytes}
        return sum(count * self._block_bytes[window] for window, count in counts.items())

    def num_blocks_that_fit(self, num_bytes: int, *, most: int) -> int:
        """Return the number of blocks that fit in `num_bytes`, at most `most`."""
        return bisect_right(range(1, most + 1), num_bytes, key=self)

    def max_blocks_bound(self, num_bytes: int, wanted: int) -> int:
        """Return an upper bound for `num_blocks_that_fit`; `wanted` if all layers have windows, because then any number may fit."""
        of_whole_text = self._block_bytes.get(None, 0) if self._limits else self(1)
        return max(wanted, num_bytes // of_whole_text) if of_whole_text else wanted

    def _num_blocks_with_window(self, window: int | None, num_blocks: int) -> int:
        return num_blocks if window is None else num_window_blocks(window, num_blocks, self._limits, BLOCK_SIZE)


def _way_out(model: ModelConfig, context: int) -> str:
    """Return the advice for a prompt that is longer than the context."""
    if context < model.max_positions or model.has_length_dependent_rope:
        return "shorten the prompt or raise max_model_len"
    return f"shorten the prompt (the model was made for {model.max_positions} tokens)"
