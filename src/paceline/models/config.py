"""What a network is, read from a checkpoint's own metadata."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.model_directory import SAFETENSORS, without_model
from paceline.models.families import Family, family_of
from paceline.models.json_fields import JsonFields
from paceline.models.rope import inverse_frequencies
from paceline.models.rope_config import RopeConfig, RopeType, read_rope
from paceline.models.safetensors_file import most_common_dtype
from paceline.small_files import is_file, read_json

MAX_LAYERS = 4096
MAX_HEAD_SIZE = 8192

__all__ = ["Activation", "ModelConfig", "RopeConfig", "RopeType", "WeightType", "config_from_values", "read_config"]


class WeightType(Enum):
    """Storage type of weights, cache and computation."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


class Activation(Enum):
    """What is applied to the gate of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder, independent of where they were read from.

    `head_size` is D, `num_heads` H, `num_kv_heads` K, `hidden_size` E, `vocab_size` V, `num_layers` L.
    `sliding_window` is set only where it cuts `max_positions` below what the checkpoint promises; a head's own layers slide within it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    weight_type: WeightType
    tied_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each q and k head before rope
    sandwich_norms: bool = False  # a second norm behind attention and MLP, in front of the addition
    norm_offset: bool = False  # HF files hold norm weights less 1 (`Weights.open` adds it); products with them are float32
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    query_scalar: float | None = None  # attention scores are divided by its root; None = head_size
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    sliding_layers: tuple[int, ...] = ()  # layers that attend within the window only
    local_rope: RopeConfig | None = None  # of the sliding layers, where it differs
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return float((self.head_size if self.query_scalar is None else self.query_scalar) ** -0.5)

    @property
    def context_end(self) -> str:
        """Why no text is longer than `max_positions`, in words."""
        if self.sliding_window is not None:
            return f"contexts end with the model's sliding window of {self.sliding_window} tokens for now"
        return f"the model was made for {self.max_positions} tokens"

    def rope_of(self, layer: int) -> RopeConfig:
        """How `layer` rotates positions."""
        return self.local_rope if self.local_rope is not None and layer in self.sliding_layers else self.rope

    def window_of(self, layer: int) -> int | None:
        """How many positions a row of `layer` sees, its own included; None = all before it."""
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different ones, the one of layers that see everything first."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def for_context(self, max_context: int | None) -> "ModelConfig":
        """The network as a run of up to `max_context` positions computes it.

        Rotary frequencies that depend on the length are chosen here, once: up to the original length those made for it, and no
        longer context then; beyond it those for `max_context`. None = the original length.
        """
        if not self.rope.type.depends_on_length:
            return self
        rope = self.rope.for_context(max_context)
        is_long = rope.context_len > rope.original_max_positions
        return replace(self, rope=rope, max_positions=self.max_positions if is_long else min(self.max_positions, rope.context_len))


_WEIGHT_TYPES = {
    "float32": WeightType.F32,
    "float16": WeightType.F16,
    "bfloat16": WeightType.BF16,
    "F32": WeightType.F32,
    "F16": WeightType.F16,
    "BF16": WeightType.BF16,
}


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def read_config(directory: Path) -> ModelConfig:
    """The network a Hugging Face checkpoint directory holds, from its config.json and generation_config.json.

    Raises:
        CheckpointError: a file is missing or no JSON, a value is missing or absurd, or the network is not one we run.
    """
    path = directory / "config.json"
    read = read_json(path)
    if read is None:
        if not any(is_file(directory / name) for name in SAFETENSORS):
            raise without_model(directory)
        raise CheckpointError(f"{path} is missing: a model directory needs config.json, tokenizer files and *.safetensors")
    values = _text_values(read)
    weight_type = None if _type_name(values) is not None else _weight_type(most_common_dtype(directory), path)
    return config_from_values(values, path, generation=read_json(directory / "generation_config.json"), weight_type=weight_type)


def config_from_values(
    values: Mapping[str, Any], path: Path, *, generation: Mapping[str, Any] | None = None, weight_type: WeightType | None = None
) -> ModelConfig:
    """The network that metadata in the terms of a Hugging Face config.json describes.

    A sliding window is honoured by ending the context where the window would begin to slide.

    Args:
        values: what config.json holds, or the same made from another format's metadata.
        path: the file errors name.
        generation: what generation_config.json holds.
        weight_type: None = the type `values` names.

    Raises:
        CheckpointError: a value is missing or absurd, or the network is not one we run.
    """
    values = _text_values(values)
    family = family_of(values, path)
    fields = JsonFields({**family.defaults, **values}, path)
    _refuse_quantised(fields)
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)  # before anything is made for every layer
    num_heads, num_kv_heads, head_size = _heads(fields)
    rope = read_rope(fields, family, head_size=head_size)
    local_rope = read_rope(fields, family, head_size=head_size, layer_type="sliding_attention") if family.has_local_rope else None
    max_positions, window = _context(fields, family, rope)
    _check_frequencies(filter(None, (rope, local_rope)), head_size, max_positions, path)
    generation = generation or {}
    return ModelConfig(
        family=family.name,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        rope=rope,
        local_rope=local_rope,
        weight_type=weight_type or _weight_type(_type_name(values), path),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        activation=_activation(fields, family),
        **family.switches(fields),
        sliding_window=window,
        bos_token_id=_bos_token_id(generation, fields.values),
        eos_token_ids=_eos_token_ids(JsonFields(generation, path.with_name("generation_config.json")), fields),
    )


def _heads(fields: JsonFields) -> tuple[int, int, int]:
    """H, K and D."""
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    num_kv_heads = fields.size("num_key_value_heads", num_heads, null=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: num_attention_heads = {num_heads} must be a multiple of num_key_value_heads = {num_kv_heads}"
        )
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.path}: no head_dim, and hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_heads}"
        )
    head_size = fields.size("head_dim", hidden_size // num_heads, null=hidden_size // num_heads, most=MAX_HEAD_SIZE)
    if head_size % 2:
        raise CheckpointError(f"{fields.path}: head_dim = {head_size}; rotary embeddings need an even one")
    return num_heads, num_kv_heads, head_size


def _context(fields: JsonFields, family: Family, rope: RopeConfig) -> tuple[int, int | None]:
    """How many positions a run may have, and the sliding window where that is what limits them."""
    max_positions = fields.size("max_position_embeddings")
    if rope.type is RopeType.DYNAMIC:
        max_positions = _longest(max_positions, rope.factor, fields)
    window = family.window(fields)
    return (max_positions, None) if window is None or window >= max_positions else (window, window)


def _longest(max_positions: int, factor: float, fields: JsonFields) -> int:
    longest = max_positions * factor
    if not 1 <= longest < 2**31:
        raise CheckpointError(
            f"{fields.path}: max_position_embeddings = {max_positions} times the rope factor {factor} are {longest:g} positions, "
            f"expected 1 to {2**31 - 1}"
        )
    return int(longest)


def _check_frequencies(ropes: Iterable[RopeConfig], head_size: int, max_positions: int, path: Path) -> None:
    """Refuse parameters each of which may be a number but from which no rotation can be computed."""
    for rope in ropes:
        for context in (None, max_positions):
            try:
                with np.errstate(all="ignore"):
                    frequencies, factor = inverse_frequencies(rope.for_context(context), head_size)
                    is_usable = bool(np.isfinite(frequencies).all() and np.isfinite(np.float32(factor)))
            except (ArithmeticError, ValueError):
                is_usable = False
            if not is_usable:
                raise CheckpointError(f"{path}: the rope parameters of type {rope.type.value!r} make frequencies that are no numbers")


def _text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's values, where metadata nests them beside those of an image encoder."""
    text = values.get("text_config")
    if values.get("model_type") != "gemma3" or not isinstance(text, Mapping):
        return values
    outer = {name: value for name, value in values.items() if name not in ("text_config", "vision_config", "architectures")}
    ends = {"eos_token_id": outer["eos_token_id"]} if outer.get("eos_token_id") is not None else {}
    return {**outer, **text, **ends, "model_type": "gemma3_text"}


def _activation(fields: JsonFields, family: Family) -> Activation:
    name = fields.values.get(family.activation_field, "silu")
    activation = _ACTIVATIONS.get(str(name))
    if activation is None:
        raise CheckpointError(
            f"{fields.path}: {family.activation_field} = {shortened(name)} is not supported, only {', '.join(map(repr, _ACTIVATIONS))} are"
        )
    return activation


def _refuse_quantised(fields: JsonFields) -> None:
    packed = fields.values.get("quantization")
    if isinstance(packed, Mapping) and {"group_size", "bits"} <= packed.keys():
        raise CheckpointError(
            f"{fields.path}: this is an MLX model with weights packed to {shortened(packed['bits'])} bits, which is read on Apple's "
            "MLX only; use the model it was made from, with quant='int8' or 'int4', or a GGUF file of it"
        )
    quantization = fields.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise CheckpointError(
            f"{fields.path}: the weights are quantised ({shortened(method)}); supported are f32, f16 and bf16: "
            "use the model it was made from"
        )


def _type_name(values: Mapping[str, Any]) -> str | None:
    name = values.get("dtype") or values.get("torch_dtype")
    return None if name is None or name == "auto" else str(name)


def _weight_type(name: str | None, path: Path) -> WeightType:
    weight_type = _WEIGHT_TYPES.get(str(name).removeprefix("torch."))
    if weight_type is None:
        raise CheckpointError(f"{path}: weights of type {shortened(name)} are not supported, only float32, float16 and bfloat16 are")
    return weight_type


def _bos_token_id(generation: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    for source in (generation, values):
        token_id = source.get("bos_token_id")
        if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < 2**31:
            return token_id
    return None


def _eos_token_ids(generation: JsonFields, fields: JsonFields) -> tuple[int, ...]:
    """Both files name end tokens and either may know one the other does not: the union, generation_config.json first."""
    return tuple(dict.fromkeys((*generation.token_ids("eos_token_id"), *fields.token_ids("eos_token_id"))))
