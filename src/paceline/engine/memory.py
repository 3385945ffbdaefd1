"""Chooses the size of the cache. The context length depends only on the model and `max_model_len`, not on memory.

    `kv_cache_gb` is given        as many blocks as fit in it
    `kv_cache_gb` is not given    blocks for a few full contexts, within a share of the machine's memory and of its free memory

On the CPU, the operating system allocates the memory of a block when a row is first written to it.
"""

from bisect import bisect_right
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from paceline.config import MAX_NUM_SEQS, EngineConfig
from paceline.errors import CapacityError, ConfigError
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.kv_cache.recurrent_state import CHECKPOINT_DEFAULTS, CheckpointConfig
from paceline.kv_cache.row_plan import num_blocks_for
from paceline.kv_cache.sliding_window import PassLimits, num_window_blocks
from paceline.machine import available_memory_bytes, total_memory_bytes
from paceline.models.config import ModelConfig
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.state_layout import StateLayout

DEFAULT_NUM_CONTEXTS = 4
"""Number of full contexts that the cache has room for if `kv_cache_gb` is not given."""
DEFAULT_TOKENS_PER_SEQUENCE = 2048
"""Minimum room per running request if `kv_cache_gb` is not given, in tokens; less if the context is shorter."""

_DRAFT_BLOCKS_PER_SEQUENCE = 2  # for draft tokens after the last token of a request
_REPLAY_RECORDS_PER_SEQUENCE = 32  # maximum rows, in a draft tree and just before it, whose recurrent updates are recorded for replay
_MAX_CHECKPOINTS = 64  # recurrent states kept for reuse, of all sequences together


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of a cache.

    Attributes:
        num_blocks: number of blocks.
        max_model_len: maximum length of prompt and output of a request.
        too_long_advice: advice to the user, in the error for a prompt that is too long.
        num_bytes: maximum size in memory, states of recurrent layers included.
        notice: a warning that a full context or `max_num_seqs` requests do not fit; None = they fit.
        checkpoints: interval and maximum number of recurrent states that are kept for later requests with the same prefix.
        max_num_seqs: number of running requests whose states of recurrent layers fit.
    """

    num_blocks: int
    max_model_len: int
    too_long_advice: str
    num_bytes: int = 0
    notice: str | None = None
    checkpoints: CheckpointConfig = CHECKPOINT_DEFAULTS
    max_num_seqs: int = MAX_NUM_SEQS

    @property
    def num_cache_tokens(self) -> int:
        """Total number of tokens, over all requests, that fit in the cache."""
        return self.num_blocks * BLOCK_SIZE

    def describe(self) -> str:
        """Return one line about the size, for the user."""
        contexts = f"{self.num_cache_tokens / self.max_model_len:.3g} contexts of {self.max_model_len:,}"
        return f"cache: up to {self.num_bytes / 1e9:.2g} GB ({self.num_cache_tokens:,} tokens, {contexts}), memory is taken as it is used"


def plan_cache(
    model: ModelConfig, config: EngineConfig, kv_cache_dtype: KVCacheDtype, limits: PassLimits | None = None, num_kv_sets: int = 1
) -> CachePlan:
    """Choose the size of the cache: `kv_cache_gb`, or else `DEFAULT_NUM_CONTEXTS` full contexts, at most `_default_bytes`.

    Args:
        kv_cache_dtype: type of the keys and values.
        limits: bounds on a pass, for sliding-window layers; None = no layer frees the rows outside its window.
        num_kv_sets: number of sets of keys and values: 2 if the passes that compute the scalings of X-LoRA adapters have their own.

    Raises:
        ConfigError: `max_model_len` exceeds the model's maximum.
        CapacityError: one block does not fit, or `max_model_len` is given and one full context does not fit.
    """
    if config.max_model_len is not None and config.max_model_len > model.max_positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's maximum is {model.max_positions} tokens: lower max_model_len"
        )
    context_len = config.max_model_len or model.max_positions
    cache_bytes = _CacheBytes(model, kv_cache_dtype, limits, num_kv_sets)
    blocks_per_context = num_blocks_for(context_len, BLOCK_SIZE) + _DRAFT_BLOCKS_PER_SEQUENCE
    max_bytes = (
        round(config.kv_cache_gb * 1e9) if config.kv_cache_gb is not None else _default_bytes(config, cache_bytes(blocks_per_context))
    )
    checkpoints, max_num_seqs, state_bytes = _plan_recurrent_states(model, config, max_bytes)
    kv_bytes, block_bytes = max_bytes - state_bytes, cache_bytes(1)
    if kv_bytes < block_bytes:  # with recurrent layers, three blocks more, because their states take up to 5/8 of a cache
        raise CapacityError(
            f"{kv_bytes / 1e9:.3g} GB are too few for a cache block of {block_bytes} bytes: "
            f"set kv_cache_gb to at least {_gb_at_least(state_bytes + (3 if state_bytes else 1) * block_bytes)}"
        )
    if config.kv_cache_gb is None:
        max_blocks = _default_blocks(context_len, config.max_num_seqs)
    else:
        max_blocks = cache_bytes.max_blocks_bound(kv_bytes, config.max_num_seqs * blocks_per_context)
    num_blocks = bisect_right(range(1, max_blocks + 1), kv_bytes, key=cache_bytes)
    num_cache_tokens = num_blocks * BLOCK_SIZE
    if num_cache_tokens < context_len and config.max_model_len is not None:
        raise CapacityError(
            f"a context of {context_len} tokens needs {_gb_at_least(cache_bytes(blocks_per_context))} GB of cache, "
            f"only {cache_bytes(num_blocks) / 1e9:.3g} GB are available: lower max_model_len or raise kv_cache_gb"
        )
    warnings = _capacity_warnings(context_len, num_cache_tokens, max_num_seqs, config.max_num_seqs)
    num_bytes = cache_bytes(num_blocks) + state_bytes
    advice, notice = _too_long_advice(model, context_len), "; ".join(warnings) or None
    return CachePlan(num_blocks, context_len, advice, num_bytes, notice, checkpoints, max_num_seqs)


def _gb_at_least(num_bytes: int) -> str:
    """Return a size in GB, rounded up to three significant digits so that a `kv_cache_gb` of this value is enough."""
    return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal(num_bytes).scaleb(-9):f}"


def _default_bytes(config: EngineConfig, context_bytes: int) -> int:
    """Return the default limit of the cache: a quarter of the machine's memory or half of the free memory, whichever is less.

    If `max_model_len` is given and one context needs more, the limit is that, up to three quarters of the free memory.
    """
    free = available_memory_bytes()
    allowed = min(total_memory_bytes() // 4, free // 2)
    return allowed if config.max_model_len is None else max(allowed, min(context_bytes, free // 4 * 3))


def _default_blocks(context_len: int, max_num_seqs: int) -> int:
    """Return the default number of blocks: for 4 full contexts or 2048 tokens of each running request, whichever is more."""
    per_sequence = min(context_len, DEFAULT_TOKENS_PER_SEQUENCE)
    for_contexts, for_sequences = (
        count * (num_blocks_for(length, BLOCK_SIZE) + _DRAFT_BLOCKS_PER_SEQUENCE)
        for count, length in ((min(DEFAULT_NUM_CONTEXTS, max_num_seqs), context_len), (max_num_seqs, per_sequence))
    )
    return max(for_contexts, for_sequences)


def _capacity_warnings(context_len: int, num_cache_tokens: int, max_num_seqs: int, requested_num_seqs: int) -> list[str]:
    """Return warnings that a full context, or more than `max_num_seqs` of the requested sequences, do not fit in the cache."""
    warnings = []
    if num_cache_tokens < context_len:
        warnings.append(
            f"the cache has room for {num_cache_tokens} tokens, less than the context of {context_len}: longer prompts are rejected, "
            "longer outputs end there; raise kv_cache_gb or lower max_model_len"
        )
    if max_num_seqs < requested_num_seqs:
        warnings.append(
            f"the states of recurrent layers leave room for {max_num_seqs} of {requested_num_seqs} requests at a time: raise kv_cache_gb"
        )
    return warnings


def _plan_recurrent_states(model: ModelConfig, config: EngineConfig, num_bytes: int) -> tuple[CheckpointConfig, int, int]:
    """Return how many recurrent states are kept as checkpoints, how many requests may run, and the bytes of all these states.

    States of running requests take at most half of the memory, checkpoints at most a quarter of the rest.
    """
    layout = StateLayout.for_layers(model.recurrent_layers)
    state_bytes, request_bytes = (
        4 * layout.num_state_values,
        4 * (layout.num_state_values + _REPLAY_RECORDS_PER_SEQUENCE * layout.num_record_values),
    )
    if state_bytes == 0:
        return CheckpointConfig(interval_rows=config.state_interval, max_checkpoints=0), config.max_num_seqs, 0
    min_bytes = state_bytes + request_bytes  # a prefill chunk writes its final state to new memory
    if min_bytes > num_bytes:
        raise CapacityError(
            f"{num_bytes / 1e9:.3g} GB are too few for the state of recurrent layers: set kv_cache_gb to at least {_gb_at_least(min_bytes)}"
        )
    num_running = min(config.max_num_seqs, max(1, (num_bytes // 2 - state_bytes) // request_bytes))
    running_bytes = state_bytes + num_running * request_bytes
    num_checkpoints = min(_MAX_CHECKPOINTS, (num_bytes - running_bytes) // 4 // state_bytes) if config.enable_prefix_caching else 0
    checkpoints = CheckpointConfig(interval_rows=config.state_interval, max_checkpoints=num_checkpoints)
    return checkpoints, num_running, running_bytes + num_checkpoints * state_bytes


class _CacheBytes:
    """Callable that returns the size in bytes of a cache with a given number of blocks; arguments as for `plan_cache`."""

    def __init__(self, model: ModelConfig, kv_cache_dtype: KVCacheDtype, limits: PassLimits | None, num_kv_sets: int) -> None:
        self._block_bytes: dict[int | None, int] = {}
        for group in model.kv_groups():
            row_bytes = num_kv_sets * group.bytes_per_token(kv_cache_dtype)
            self._block_bytes[group.window] = self._block_bytes.get(group.window, 0) + row_bytes * BLOCK_SIZE
        self._limits = limits

    def __call__(self, num_blocks: int) -> int:
        counts = {
            window: num_blocks if window is None else num_window_blocks(window, num_blocks, self._limits, BLOCK_SIZE)
            for window in self._block_bytes
        }
        return sum(count * self._block_bytes[window] for window, count in counts.items())

    def max_blocks_bound(self, num_bytes: int, min_blocks: int) -> int:
        """Return an upper bound for the number of blocks that fit in `num_bytes`, but at least `min_blocks`."""
        bytes_per_block = self._block_bytes.get(None, 0) if self._limits else self(1)
        return max(min_blocks, num_bytes // bytes_per_block) if bytes_per_block else min_blocks


def _too_long_advice(model: ModelConfig, context_len: int) -> str:
    """Return the advice to the user in the error for a prompt that is longer than the context."""
    if context_len < model.max_positions or model.has_length_dependent_rope:
        return "shorten the prompt or raise max_model_len"
    return f"shorten the prompt (the model's maximum is {model.max_positions} tokens)"
