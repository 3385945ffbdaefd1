"""The supported families in one table: what differs between them, and the tensors a network has.

All are pre-norm decoders with rotary attention and a gated MLP (`runtimes/decoder.py`). A family differs in which
projections have a bias, whether q and k heads are normed, how a sliding window is declared, and in a few defaults.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError

if TYPE_CHECKING:
    from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Typed access to the values of one JSON file, with errors that name it."""

    values: Mapping[str, Any]
    path: Path

    def size(self, name: str, default: int | None = None, *, null: int | None = None) -> int:
        """A count >= 1; `default` where it is absent, `null` (or the default) where it is null."""
        value = self.values.get(name, default)
        if value is None:
            value = default if null is None else null
        if value is None:
            raise CheckpointError(f"{self.path} has no {name!r}: it does not describe a decoder we can run")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected an integer from 1 to {2**31 - 1}")
        return value

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected a finite number")
        return float(value)

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.optional_number(name)
        return default if value is None else value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path} has no {name!r}, which its rope type needs")
        if value <= 0:
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected a number above 0")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, several or none."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected a token id or a list of them")
        return tuple(ids)


Switches = dict[str, bool]


@dataclass(frozen=True, slots=True)
class Family:
    """What is particular about one family; defaults are what its configuration class in transformers assumes."""

    name: str
    architecture: str
    switches: Callable[[JsonFields], Switches]
    sliding_window: Callable[[JsonFields], int | None]
    default_max_positions: int
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_size: int | None = None  # None: hidden size / heads
    default_bos_token_id: int | None = None
    default_eos_token_id: int | None = None


def _llama_switches(fields: JsonFields) -> Switches:
    bias = fields.flag("attention_bias", default=False)
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": fields.flag("mlp_bias", default=False)}


def _qwen3_switches(fields: JsonFields) -> Switches:
    bias = fields.flag("attention_bias", default=False)
    return {"attention_bias": bias, "output_bias": bias, "qk_norm": True}


def _mistral_window(fields: JsonFields) -> int | None:
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.size("sliding_window", 4096)


def _qwen_window(fields: JsonFields) -> int | None:
    """The window of the layers that have one: those listed in `layer_types`, else those from `max_window_layers` on."""
    if not fields.flag("use_sliding_window", default=False) or fields.values.get("sliding_window", 4096) is None:
        return None
    layer_types = fields.values.get("layer_types")
    if isinstance(layer_types, list):
        slides = "sliding_attention" in layer_types
    else:
        slides = fields.number("max_window_layers", 28) < fields.size("num_hidden_layers")
    return fields.size("sliding_window", 4096) if slides else None


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            switches=_llama_switches,
            sliding_window=lambda _: None,
            default_max_positions=2048,
            default_bos_token_id=1,
            default_eos_token_id=2,
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            switches=lambda _: {},
            sliding_window=_mistral_window,
            default_max_positions=131072,
            default_kv_heads=8,
            default_bos_token_id=1,
            default_eos_token_id=2,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            switches=lambda _: {"attention_bias": True},
            sliding_window=_qwen_window,
            default_max_positions=32768,
            default_kv_heads=32,
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            switches=_qwen3_switches,
            sliding_window=_qwen_window,
            default_max_positions=32768,
            default_kv_heads=32,
            default_head_size=128,
        ),
    )
}


def family_of(values: Mapping[str, Any], path: Path) -> Family:
    """The family a config.json names by `model_type`, or by its architecture where that is absent.

    Raises:
        CheckpointError: it is none of ours, or not a causal language model.
    """
    architectures = values.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    model_type = values.get("model_type")
    by_architecture = {family.architecture.lower(): family for family in FAMILIES.values()}
    family = by_architecture.get(str(architecture).lower()) if model_type is None else FAMILIES.get(str(model_type))
    if family is None or (architecture is not None and architecture.lower() != family.architecture.lower()):
        raise CheckpointError(
            f"{path} describes model_type {model_type!r} with architecture {architecture!r}, which is not supported; "
            f"supported are {', '.join(f'{known.name} ({known.architecture})' for known in FAMILIES.values())}"
        )
    return family


def tensor_shapes(config: "ModelConfig") -> dict[str, tuple[int, ...]]:
    """Every tensor of the network, by our name, with its shape; matrices are [out, in]."""
    query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = {
        "q_proj": (query_size, hidden, config.attention_bias),
        "k_proj": (kv_size, hidden, config.attention_bias),
        "v_proj": (kv_size, hidden, config.attention_bias),
        "o_proj": (hidden, query_size, config.output_bias),
        "gate_proj": (inner, hidden, config.mlp_bias),
        "up_proj": (inner, hidden, config.mlp_bias),
        "down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    if config.qk_norm:
        norms |= {"q_norm": config.head_size, "k_norm": config.head_size}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, size in norms.items():
            shapes[f"layers.{layer}.{name}.weight"] = (size,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"layers.{layer}.{name}.bias"] = (rows,)
    shapes["final_norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


_CHECKPOINT_PARTS = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}


def checkpoint_name(name: str) -> str:
    """How Hugging Face checkpoints call our tensor: `layers.3.q_proj.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *prefix, part, kind = name.split(".")
    return ".".join((["model", *prefix] if prefix else []) + [_CHECKPOINT_PARTS[part], kind])
