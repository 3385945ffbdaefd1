"""Settings of an engine, checked once and never changed."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError
from paceline.machine import usable_processors

NUMERICS = ("exact", "fast")
DTYPES = ("auto", "bf16", "f16", "f32")
KV_CACHE_DTYPES = ("auto", "f32", "bf16", "f16", "int8")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "native", "torch")
QUANT = ("none", "int8", "int4")
DRAFT_QUANT = ("auto", *QUANT)
_MOST_BITS_OF_8, _MOST_BITS_OF_16 = 10.0, 20.0  # a value, scales included, of what counts as 8 and as 16 bits
GGUF_WEIGHTS = ("exact", "regroup")
ACCEPTANCE = ("match", "rejection")
MAX_SPECULATIVE_TOKENS = 64
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 4096
_WEIGHTS_CACHE_GB = 50
_MOST_GB = 1_000_000
MAX_PASS_ROWS = MAX_NUM_BATCHED_TOKENS + MAX_NUM_SEQS
"""Rows of one pass of any network: those of a step, and room for what a head guesses behind them in the same pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantOptions:
    """How the matrices of a network are quantised while it is loaded.

    Bits are 4 or 8, or None for a matrix that stays as it is stored.

    Attributes:
        bits: of every matrix not covered below.
        group: columns that share a scale: 32, 64 or 128; a matrix whose width it does not divide gets the next smaller one that does.
        symmetric: codes stand for multiples of a scale around zero, else from a group's minimum on.
        embedding_bits, lm_head_bits: of these two; if one matrix is both, the larger number counts.
        overrides: (pattern, bits) for matrices that need another treatment, such as ("layers.*.down_proj.weight", 8), or a mapping; the
            first pattern that matches our name of a tensor overrides everything above.
    """

    bits: int = 8
    group: int = 128
    symmetric: bool = True
    embedding_bits: int | None = 8
    lm_head_bits: int | None = 8
    overrides: tuple[tuple[str, int | None], ...] = ()

    def __post_init__(self) -> None:
        given: object = self.overrides
        overrides = tuple(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(overrides, Sequence) or not all(_is_override(one) for one in overrides):
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


def _is_override(one: object) -> bool:
    return isinstance(one, Sequence) and not isinstance(one, str) and len(one) == 2 and isinstance(one[0], str)


Quant = str | QuantOptions


def quant_options(name: str, quantization: Quant) -> QuantOptions | None:
    """The options that a quantisation setting stands for; None = no quantisation.

    Args:
        name: of the setting, for the error.

    Raises:
        ConfigError: it is unknown.
    """
    if isinstance(quantization, QuantOptions):
        return quantization
    _check_choice(name, quantization, QUANT)
    return None if quantization == "none" else QuantOptions(bits=int(quantization.removeprefix("int")))


def draft_quant_options(quantization: Quant, target_bits: float | None, *, device: str = "cpu") -> QuantOptions | None:
    """The options that `draft_quantization` stands for; None = no quantisation.

    Args:
        target_bits: bits a value of the target's matrices: a draft model takes about half as many; None for heads, which follow nobody.
        device: where both run: on a GPU quantised weights are expanded while they are loaded.

    Raises:
        ConfigError: it is unknown.
    """
    if quantization != "auto":
        if not isinstance(quantization, QuantOptions):
            _check_choice("draft_quantization", quantization, DRAFT_QUANT)
        return quant_options("draft_quantization", quantization)
    if target_bits is None or target_bits > _MOST_BITS_OF_16 or device != "cpu":
        return None
    return QuantOptions(bits=4 if target_bits <= _MOST_BITS_OF_8 else 8)


def copy_quant_options(draft: QuantOptions | None, target: QuantOptions | None) -> QuantOptions | None:
    """How a head quantises rows that it copies of its target's vocabulary matrix; None = it reads them where they lie.

    Args:
        draft: how a draft model of this target is quantised.
        target: how the target is while it is loaded.
    """
    bits = None if target is None else target.lm_head_bits
    return None if draft is not None and bits is not None and bits <= draft.bits else draft


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How to guess.

    Attributes:
        drafter: "auto", "none", a name of the table in drafters/__init__.py, or the directory or id of a draft model or of heads; several
            guess together.
        num_speculative_tokens: tokens to draft per step at most, or "auto" (16): how many is decided step by step, by what pays.
        tree_width: guesses per position, of draft models and heads; 1 = a chain, or what Medusa heads make of its rows.
        draft_quantization: quantise draft models and heads while loading: "none", "int8", "int4" or `QuantOptions`; "auto": draft models on
            the CPU, to 4 bits beside a target of at most 10 bits a value, to 8 beside one of 16, and rows that a
            head copies of the target's vocabulary matrix likewise; nothing else of heads.
        draft_adapter: directory of a LoRA adapter that the draft model computes with; None = it computes as it is.
        drafter_options: settings of single methods by name, such as {"tree": "accuracy"}; see drafters/options.py.
        acceptance: which guesses are kept: "match" (those the target itself draws: a seed gives the same text as without drafting) or
            "rejection" (rejection sampling: keeps more; sampled texts have the target's distribution, but a seed gives other texts than
            without drafting). No difference at temperature 0.
    """

    drafter: str | tuple[str, ...] = "auto"
    num_speculative_tokens: int | str = "auto"
    tree_width: int = 1
    draft_quantization: Quant = "auto"
    draft_adapter: str | None = None
    acceptance: str = "match"
    drafter_options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names: object = (self.drafter,) if isinstance(self.drafter, str) else self.drafter
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f'drafter is {self.drafter!r}: use "auto", "none", "ngram" or the directory or id of a draft model')
        count = self.num_speculative_tokens
        if count != "auto" and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_SPECULATIVE_TOKENS):
            raise ConfigError(f'num_speculative_tokens is {count!r}: use "auto" or a whole number from 1 to {MAX_SPECULATIVE_TOKENS}')
        _check_int("tree_width", self.tree_width, 1, 8)
        draft_quant_options(self.draft_quantization, None)
        _check_directory("draft_adapter", self.draft_adapter)
        _check_choice("acceptance", self.acceptance, ACCEPTANCE)
        options: object = self.drafter_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ConfigError(f'drafter_options is {options!r}: use a mapping of names to values, such as {{"tree": "accuracy"}}')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to load and run a target.

    Attributes:
        model: "mini", a directory, a GGUF file, or a Hugging Face id.
        gguf_file: name of the GGUF file to take from the directory or from the Hub's model; None = the only one.
        gguf_weights: "exact" (the values of the file) or "regroup" (quantise its matrices again, to larger groups that run faster).
        numerics: "exact" (a token never depends on what else is in the pass) or "fast".
        dtype: type to compute in; "auto" = as stored. Only "f32" leaves rows unrounded in front of quantised matrices.
        quantization: quantise the matrices while loading: "none", "int8", "int4" or `QuantOptions`.
        threads: CPU threads; None = as many as processors this process may use; more would be slower.
        oversubscribe: use as many threads as `threads` says, even where there are fewer processors.
        max_model_len: longest prompt + output; None = what the model was made for.
        kv_cache_dtype: type of keys and values in the cache: "f32", "bf16", "f16" or "int8" (a scale a row and head); "auto" = that of
            computation, f16 for quantised GGUF files.
        kv_cache_gb: memory for keys and values at most, taken as it is used; None = enough for 4 full contexts or 2048 tokens of each of
            `max_num_seqs`, at most a quarter of the machine's memory and half of what is free.
        device: "auto", "cpu" or "cuda".
        backend: what computes: "native" (our kernels) or "torch"; "auto" = the faster one for this machine.
        max_num_seqs: requests that run at a time, at most as many as a pass has rows.
        max_num_batched_tokens: rows of one pass, known tokens and drafts of all requests.
        prefill_chunk_size: prompt rows of a pass, of all requests together; decoding requests come first.
        enable_prefix_caching: whether rows of earlier requests are kept while there is room, for those that begin with the same tokens.
        state_interval: rows between the stored states of recurrent layers, a multiple of 32; a text also has one after
            the last 32 rows it filled.
        adapters: directories of LoRA adapters by the names that requests have for them.
        merge_adapter: directory of a LoRA adapter that is added to the weights before they are rounded or quantised: another target.
        revision, hf_token, offline: for models from the Hugging Face Hub.
    """

    model: str = "mini"
    gguf_file: str | None = None
    gguf_weights: str = "exact"
    numerics: str = "exact"
    dtype: str = "auto"
    quantization: Quant = "none"
    threads: int | None = None
    oversubscribe: bool = False
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
        _check_choice("gguf_weights", self.gguf_weights, GGUF_WEIGHTS)
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
        for name in ("enable_prefix_caching", "oversubscribe", "offline"):
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
        """Threads to compute with."""
        if self.threads is None:
            return usable_processors()
        return self.threads if self.oversubscribe else min(self.threads, usable_processors())

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines a user should see about settings that are not followed here."""
        if self.threads is None or self.num_threads == self.threads:
            return ()
        return (
            f"threads is {self.threads}, and {self.num_threads} are used: more than the processors this process may use make it slower "
            "(oversubscribe insists)",
        )


def cache_directory() -> Path | None:
    """Where measured facts about this machine are kept between runs (PACELINE_CACHE, else the user's cache directory).

    None = nowhere: this user has no home directory, as in a container that runs under another uid.
    """
    own = os.environ.get("PACELINE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paceline"
    except RuntimeError:
        return None


def weights_cache_bytes() -> int:
    """What quantised weights in the cache directory may take together (PACELINE_CACHE_GB, else 50 GB); 0 = none are kept.

    Raises:
        ConfigError: PACELINE_CACHE_GB is no number from 0 on.
    """
    given = os.environ.get("PACELINE_CACHE_GB", "").strip() or str(_WEIGHTS_CACHE_GB)
    try:
        size = float(given)
    except ValueError:
        size = -1.0
    if not 0.0 <= size <= _MOST_GB:
        raise ConfigError(f"PACELINE_CACHE_GB is {given!r}: set it to a number of gigabytes from 0 to {_MOST_GB}, 0 keeps no weights")
    return int(size * 1e9)


def api_keys_of_environment() -> str:
    """Who may ask a server, a key a line (PACELINE_API_KEYS; commas separate keys too); empty = not said there."""
    return os.environ.get("PACELINE_API_KEYS", "").replace(",", "\n")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}: use one of {', '.join(choices)}")


def _check_directory(name: str, value: object) -> None:
    if not isinstance(value, str | None) or value == "":
        raise ConfigError(f"{name} is {value!r}: give the directory of a LoRA adapter")


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}: use a whole number from {low} to {high}")
