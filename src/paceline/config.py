"""Settings of an engine and of speculative decoding. They are checked when created, and immutable."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError
from paceline.machine import performance_processors, usable_processors

NUMERICS = ("exact", "fast")
DTYPES = ("auto", "bf16", "f16", "f32")
_DTYPE_ALIASES = {"float16": "f16", "half": "f16", "fp16": "f16", "bfloat16": "bf16", "float32": "f32", "float": "f32", "fp32": "f32"}
"""Names of types in PyTorch, and the names that `dtype` takes."""
KV_CACHE_DTYPES = ("auto", "f32", "bf16", "f16", "int8")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "native", "torch")
QUANTIZATIONS = ("none", "int8", "int4")
DRAFT_QUANTIZATIONS = ("auto", *QUANTIZATIONS)
_MAX_BITS_OF_INT8_WEIGHTS, _MAX_BITS_OF_16_BIT_WEIGHTS = 10.0, 20.0  # thresholds in bits per value, with the quantisation scales
GGUF_WEIGHTS_CHOICES = ("exact", "regroup")
ACCEPTANCE_RULES = ("match", "rejection")
MAX_SPECULATIVE_TOKENS = 64
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 4096
_DEFAULT_WEIGHTS_CACHE_GB = 50
_MAX_WEIGHTS_CACHE_GB = 1_000_000
MAX_PASS_ROWS = MAX_NUM_BATCHED_TOKENS + MAX_NUM_SEQS
"""Maximum rows of one pass of any network: the rows of a step, and one drafted row per request in a pass of a drafting head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantOptions:
    """How the weight matrices of a network are quantised during loading. Bits are 4, 8, or None (kept as stored).

    Attributes:
        bits: bits per value of matrices for which no other attribute sets them.
        group: number of columns that share a scale: 32, 64 or 128. If it does not divide the width of a matrix, the largest of
            these that divides the width is used.
        embedding_bits, lm_head_bits: bits of these two matrices. If the matrices are tied, the larger number is used.
        overrides: (pattern, bits) pairs or a mapping, such as {"layers.*.down_proj.weight": 8}. For a tensor whose name matches, the first
            matching pattern sets the bits.
    """

    bits: int = 8
    group: int = 128
    embedding_bits: int | None = 8
    lm_head_bits: int | None = 8
    overrides: tuple[tuple[str, int | None], ...] = ()

    def __post_init__(self) -> None:
        unchecked_overrides: object = self.overrides
        overrides = tuple(unchecked_overrides.items()) if isinstance(unchecked_overrides, Mapping) else unchecked_overrides
        if not isinstance(overrides, Sequence) or not all(_is_override(item) for item in overrides):
            raise ConfigError(
                f"overrides is {self.overrides!r}: give patterns of names with their bits, such as {{'layers.*.down_proj.weight': 8}}"
            )
        object.__setattr__(self, "overrides", tuple((pattern, bits) for pattern, bits in overrides))
        if self.bits not in (4, 8):
            raise ConfigError(f"bits is {self.bits!r}: use 4 or 8")
        if self.group not in (32, 64, 128):
            raise ConfigError(f"group is {self.group!r}: use 32, 64 or 128")
        named = {"embedding_bits": self.embedding_bits, "lm_head_bits": self.lm_head_bits}
        for name, bits in (*named.items(), *((f"the override {pattern!r}", bits) for pattern, bits in self.overrides)):
            if bits not in (4, 8, None):
                raise ConfigError(f"{name} is {bits!r}: use 4, 8 or None")


def _is_override(item: object) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2 and isinstance(item[0], str)


Quantization = str | QuantOptions


def quant_options(name: str, quantization: Quantization) -> QuantOptions | None:
    """Convert the value of a quantisation setting to options; None = no quantisation.

    Args:
        name: name of the setting, for the error.

    Raises:
        ConfigError: the value is unknown.
    """
    if isinstance(quantization, QuantOptions):
        return quantization
    _check_choice(name, quantization, QUANTIZATIONS)
    return None if quantization == "none" else QuantOptions(bits=int(quantization.removeprefix("int")))


def draft_quant_options(quantization: Quantization, target_bits: float, *, device: str = "cpu") -> QuantOptions | None:
    """Convert the value of `draft_quantization` to options; None = no quantisation.

    Args:
        target_bits: bits per value of the target's matrices. With "auto", a draft model or head gets about half as many bits.
        device: device of the target and the drafter. "auto" quantises on the CPU only, because a GPU dequantises weights.

    Raises:
        ConfigError: the value is unknown.
    """
    if quantization != "auto":
        if not isinstance(quantization, QuantOptions):
            _check_choice("draft_quantization", quantization, DRAFT_QUANTIZATIONS)
        return quant_options("draft_quantization", quantization)
    if target_bits > _MAX_BITS_OF_16_BIT_WEIGHTS or device != "cpu":
        return None
    return QuantOptions(bits=4 if target_bits <= _MAX_BITS_OF_INT8_WEIGHTS else 8)


def lm_head_copy_options(draft: QuantOptions | None, target: QuantOptions | None) -> QuantOptions | None:
    """Return how a drafting head quantises its copy of rows of the target's LM head; None = the head reads the target's matrix.

    Args:
        draft: quantisation that a draft model of this target would get.
        target: quantisation of the target.
    """
    bits = None if target is None else target.lm_head_bits
    return None if draft is not None and bits is not None and bits <= draft.bits else draft


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Settings of speculative decoding: arguments of `paceline.LLM` with the same names. A tuple names several drafters."""

    drafter: str | tuple[str, ...] = "auto"
    num_speculative_tokens: int | str = "auto"
    tree_width: int = 1
    draft_quantization: Quantization = "auto"
    draft_adapter: str | None = None
    acceptance: str = "match"
    drafter_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names: object = (self.drafter,) if isinstance(self.drafter, str) else self.drafter
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f'drafter is {self.drafter!r}: use "auto", "none", "suffix" or the directory or id of a draft model')
        count = self.num_speculative_tokens
        if count != "auto" and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_SPECULATIVE_TOKENS):
            raise ConfigError(f'num_speculative_tokens is {count!r}: use "auto" or a whole number from 1 to {MAX_SPECULATIVE_TOKENS}')
        _check_int("tree_width", self.tree_width, 1, 8)
        draft_quant_options(self.draft_quantization, 16.0)
        _check_directory("draft_adapter", self.draft_adapter)
        _check_choice("acceptance", self.acceptance, ACCEPTANCE_RULES)
        options: object = self.drafter_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ConfigError(f'drafter_options is {options!r}: use a mapping of names to values, such as {{"tree": "accuracy"}}')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings for loading and running a target: arguments of `paceline.LLM` with the same names."""

    model: str = "mini"
    gguf_file: str | None = None
    gguf_weights: str = "exact"
    numerics: str = "exact"
    dtype: str = "auto"
    quantization: Quantization = "none"
    threads: int | None = None
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_gb: float | None = None
    device: str = "auto"
    backend: str = "auto"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefill_chunk_size: int = 256
    enable_prefix_caching: bool = True
    state_interval: int = 512
    adapters: Mapping[str, str] = field(default_factory=dict)
    merge_adapter: str | None = None
    revision: str | None = None
    hf_token: str | None = field(default=None, repr=False)
    offline: bool = False

    def __post_init__(self) -> None:
        _check_choice("numerics", self.numerics, NUMERICS)
        _check_choice("gguf_weights", self.gguf_weights, GGUF_WEIGHTS_CHOICES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("backend", self.backend, BACKENDS)
        quant_options("quantization", self.quantization)
        _check_int("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_NUM_BATCHED_TOKENS)
        _check_int("prefill_chunk_size", self.prefill_chunk_size, 1, MAX_NUM_BATCHED_TOKENS)
        _check_int("state_interval", self.state_interval, 32, 2**20)
        if self.state_interval % 32:
            raise ConfigError(f"state_interval is {self.state_interval}: use a multiple of 32, such as 512")
        for name in ("revision", "hf_token"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"{name} is of type {type(getattr(self, name)).__name__}: use a text, or None")
        adapters: object = self.adapters
        if not isinstance(adapters, Mapping) or not all(isinstance(one, str) and one for pair in adapters.items() for one in pair):
            raise ConfigError(f"adapters is {adapters!r}: use a mapping of names to directories, such as {{'sql': 'adapters/sql'}}")
        _check_directory("merge_adapter", self.merge_adapter)
        for name in ("enable_prefix_caching", "offline"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: use true or false")
        if self.threads is not None:
            _check_int("threads", self.threads, 1, 1024)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2, 10_000_000)
        if self.kv_cache_gb is not None and not _is_between(self.kv_cache_gb, 0, 100_000):
            raise ConfigError(f"kv_cache_gb is {self.kv_cache_gb!r}: use a size in gigabytes above 0 and at most 100000, such as 2 or 0.5")

    @property
    def num_threads(self) -> int:
        """Number of CPU threads that kernels use."""
        return performance_processors() if self.threads is None else min(self.threads, usable_processors())

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages to the user about settings that have no effect, one line each."""
        if self.threads is None or self.num_threads == self.threads:
            return ()
        return (f"threads is {self.threads}, but only {self.num_threads} are used: this process may use {self.num_threads} processors",)


def cache_directory() -> Path | None:
    """Return the directory for measured times and quantised weights (PACELINE_CACHE, or else the user's cache directory).

    None = the user has no home directory, as in a container that runs under an unknown user id.
    """
    if configured := os.environ.get("PACELINE_CACHE"):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paceline"
    except RuntimeError:
        return None


def weights_cache_bytes() -> int:
    """Return the maximum bytes of quantised weights in the cache directory (PACELINE_CACHE_GB, or else 50 GB); 0 = do not cache any.

    Raises:
        ConfigError: PACELINE_CACHE_GB is not a number >= 0.
    """
    configured = os.environ.get("PACELINE_CACHE_GB", "").strip() or str(_DEFAULT_WEIGHTS_CACHE_GB)
    try:
        size = float(configured)
    except ValueError:
        size = -1.0
    if not 0.0 <= size <= _MAX_WEIGHTS_CACHE_GB:
        raise ConfigError(f"PACELINE_CACHE_GB is {configured!r}: set it to a number from 0 (no cache) to {_MAX_WEIGHTS_CACHE_GB}")
    return int(size * 1e9)


def api_keys_from_environment() -> str:
    """Return the server's API keys from PACELINE_API_KEYS, one per line; empty = not set. Commas also separate keys."""
    return os.environ.get("PACELINE_API_KEYS", "").replace(",", "\n")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        alias = _DTYPE_ALIASES.get(str(value).removeprefix("torch.")) if choices is DTYPES else None
        raise ConfigError(f"{name} is {value!r}: " + (f"did you mean {alias!r}? " if alias else "") + f"use one of {', '.join(choices)}")


def _check_directory(name: str, value: object) -> None:
    if not isinstance(value, str | None) or value == "":
        raise ConfigError(f"{name} is {value!r}: give the directory of a LoRA adapter")


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}: use a whole number from {low} to {high}")
