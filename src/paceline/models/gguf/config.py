"""Derive config.json fields from the metadata of a GGUF file. `models/config.py` then reads the model's config from these fields."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.models.config import FLOAT_TYPES, ModelConfig, WeightType, config_from_values
from paceline.models.families.family import Family, GgufFormat
from paceline.models.families.gemma4 import ASSISTANT_ARCHITECTURES
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.fields import GgufFields
from paceline.models.gguf.file import GgufFile
from paceline.models.rope import inverse_frequencies
from paceline.models.rope_config import RopeConfig, RopeType

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors with divisors of rotary frequencies. They are read with the config, not as weights."""

_DRAFTER_ARCHITECTURES = ("eagle3", "dflash")
_LLAMA3_ROPE_FIELDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_METADATA_KEYS = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "partial_rotary_factor": "rope.dimension_count",
    "rope_scaling": "rope.scaling.type",
    "rope_theta": "rope.freq_base",
}
"""Metadata keys, without the architecture prefix, of config.json fields. Errors name the key instead of the field."""


_NEUTRAL_METADATA_VALUES: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}
"""Metadata keys that can change the network, and the values that leave it unchanged. If a family does not read a key, only such a value
is accepted. Source: llama.cpp, src/llama-arch.cpp."""


_SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
"""Metadata keys without their prefix `general.sampling.`, by config.json fields. Source: llama.cpp, gguf-py/gguf/constants.py."""


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the config of a GGUF file's model. If most weights are quantised, the model computes in float32, where their values are exact.

    Raises:
        CheckpointError: A value is missing or out of range, or the network is not supported.
    """
    fields = GgufFields(file)
    family = _find_family(fields)
    generation = {"suppress_tokens": file.metadata.get("tokenizer.ggml.suppress_tokens")}
    generation |= {name: file.metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    reader = _ConfigReader(file, family)
    values = reader.config_fields()
    reader.refuse_unread_settings()
    try:
        return config_from_values(
            values, file.path, generation=generation, weight_type=FLOAT_TYPES.get(file.main_block_type, WeightType.F32)
        )
    except CheckpointError as error:
        raise with_metadata_keys(error, fields.architecture, gguf_format(family).metadata_keys) from None


def read_decoder_fields(file: GgufFile) -> dict[str, Any]:
    """Return the config.json fields for the layer sizes and rotary embeddings of a drafting head in a GGUF file.

    Raises:
        CheckpointError: A value is missing, out of range or not supported.
    """
    return _ConfigReader(file, FAMILIES["llama"]).decoder_fields()


def gguf_format(family: Family) -> GgufFormat:
    """Return the GGUF format of a family.

    Raises:
        CheckpointError: GGUF files of the family are not supported.
    """
    found = FAMILIES[family.gguf_family].gguf if family.gguf_family is not None else family.gguf
    if found is None:
        raise CheckpointError(f"there are no GGUF files of {family.name}: use safetensors")
    return found


def with_metadata_keys(error: CheckpointError, architecture: str, keys: Mapping[str, str]) -> CheckpointError:
    """Return `error` with the names of config.json fields replaced by GGUF metadata keys.

    Args:
        keys: metadata keys of config.json fields that only this family has.
    """
    known = {**_METADATA_KEYS, **keys}
    pattern = rf"\b({'|'.join(known)})\b"
    return CheckpointError(re.sub(pattern, lambda found: f"{architecture}.{known[found[0]]}", str(error)))


def _find_family(fields: GgufFields) -> Family:
    """Return the model family of a GGUF file. If several have its architecture, a family whose `matches` returns true takes precedence."""
    if fields.architecture in ASSISTANT_ARCHITECTURES:
        raise CheckpointError(f"{fields.file.path} holds an assistant, a drafter for a Gemma 4 model: pass the file as its drafter")
    if fields.architecture in _DRAFTER_ARCHITECTURES:
        raise CheckpointError(f"{fields.file.path} holds a drafter ({fields.architecture}): pass it as the drafter of its target")
    formats = [(family, family.gguf) for family in FAMILIES.values() if family.gguf is not None]
    formats.sort(key=lambda item: item[1].matches is None)
    for family, gguf in formats:
        if fields.architecture in gguf.architectures and (gguf.matches is None or gguf.matches(fields)):
            return family
    known = dict.fromkeys(architecture for _, gguf in formats for architecture in gguf.architectures)
    raise CheckpointError(
        f"{fields.file.path} holds architecture {shortened(fields.architecture)}, which is not supported; supported are {', '.join(known)}"
    )


class _ConfigReader(GgufFields):
    """Derives the config.json fields from the metadata of one GGUF file."""

    def __init__(self, file: GgufFile, family: Family) -> None:
        super().__init__(file)
        self._family, self._format = family, gguf_format(family)

    def config_fields(self) -> dict[str, Any]:
        """Return all config.json fields: those common to all families, and those that the model's family adds."""
        decoder = self.decoder_fields()
        num_blocks = decoder["num_hidden_layers"]
        values: dict[str, Any] = {
            "model_type": self._family.name,
            "vocab_size": self.vocab_size(decoder["hidden_size"]),
            "tie_word_embeddings": not self.has_tensor("output.weight") and not self._format.has_untied_output,
            "attention_bias": self.has_in_any_block("attn_q.bias", num_blocks),
            "attention_out_bias": self.has_in_any_block("attn_output.bias", num_blocks),
            "mlp_bias": self.has_in_any_block("ffn_up.bias", num_blocks),
            "bos_token_id": self.metadata_value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._end_token_ids(),
            **decoder,
        }
        return values | self._format.read_extra_fields(self, values)

    def decoder_fields(self) -> dict[str, Any]:
        """Return the config.json fields for the sizes of layers and their rotary embeddings."""
        sizes = {"allows_zero": self._format.allows_zero_layer_sizes, "allows_mixed": self._format.allows_different_layer_sizes}
        hidden_size, num_heads = self.count("embedding_length"), self.uniform_layer_size("attention.head_count", **sizes)
        head_size, max_positions = self._head_size(hidden_size, num_heads), self.count("context_length")
        expert_width = self.architecture_value("expert_feed_forward_length")
        values: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": self.uniform_layer_size("feed_forward_length", expert_width, **sizes),
            "num_hidden_layers": self.num_blocks(),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.uniform_layer_size("attention.head_count_kv", num_heads, **sizes),
            "head_dim": head_size,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon", self.architecture_value(self._format.norm_eps_key)),
            "max_position_embeddings": max_positions,
        }
        return values | (self._rope_fields(head_size, max_positions) if self._format.has_rope else {})

    def refuse_unread_settings(self) -> None:
        """Refuse metadata that changes the network and that `config_fields` has not read.

        Raises:
            CheckpointError: The metadata holds such a value.
        """
        for key, neutral in _NEUTRAL_METADATA_VALUES.items():
            if key not in self.keys_read and (value := self.architecture_value(key)) is not None and value not in neutral:
                raise CheckpointError(
                    f"{self.file.path}: {self.architecture}.{key} = {shortened(value)} is not supported for {self._family.name}, "
                    f"only {' and '.join(map(str, neutral))} {'are' if len(neutral) > 1 else 'is'}"
                )

    def _head_size(self, hidden_size: int, num_heads: int) -> int:
        if self._format.has_latent_attention:
            return self.count("rope.dimension_count")
        size = self.count("attention.key_length", max(hidden_size // num_heads, 1))
        value_size = self.count("attention.value_length", size)
        if size != value_size:
            self.raise_invalid("attention.value_length", value_size, f"the size of keys, {size}")
        return size

    def _end_token_ids(self) -> list[Any]:
        """Return the ids of end-of-sequence tokens. `config_from_values` checks them."""
        ids = [self.metadata_value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return [token_id for index, token_id in enumerate(ids) if token_id is not None and token_id not in ids[:index]]

    def _rope_fields(self, head_size: int, max_positions: int) -> dict[str, Any]:
        theta = self.number("rope.freq_base", 10000.0)
        rotary_size = self.count("rope.dimension_count", head_size)
        if rotary_size > head_size:
            self.raise_invalid("rope.dimension_count", rotary_size, f"at most the head size, {head_size}")
        values = {"rope_theta": theta, "partial_rotary_factor": rotary_size / head_size}
        original_len = self.count("rope.scaling.original_context_length", max_positions)
        scaling = self._rope_scaling_fields(theta, rotary_size, original_len, max_positions)
        if scaling is None:
            return values
        original_len = scaling.get("original_max_position_embeddings", original_len)
        return {**values, "rope_scaling": scaling, "original_max_position_embeddings": original_len}

    def _rope_scaling_fields(self, theta: float, rotary_size: int, original_len: int, max_positions: int) -> dict[str, Any] | None:
        kind = self.architecture_value("rope.scaling.type") or "none"
        factor = self.number("rope.scaling.factor", 1.0)
        if self.has_tensor("rope_factors_short.weight") or self.has_tensor("rope_factors_long.weight"):
            return self._longrope_fields(rotary_size, original_len, max_positions)
        if self.has_tensor("rope_freqs.weight"):
            if kind != "none":
                raise CheckpointError(
                    f"{self.file.path}: rope_freqs.weight together with rope.scaling.type = {shortened(kind)} is not supported"
                )
            return self._fields_from_rope_freqs(theta, rotary_size, max_positions)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return self._yarn_fields(factor, original_len)
        raise CheckpointError(
            f"{self.file.path}: rope.scaling.type = {shortened(kind)} is not supported, only none, linear, yarn and longrope are"
        )

    def _yarn_fields(self, factor: float, original_len: int) -> dict[str, Any]:
        betas = {name: self.architecture_value(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_len}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
        if (multiplier := self.architecture_value("rope.scaling.yarn_log_multiplier")) is not None:
            return {**scaling, "mscale": 1.0, "mscale_all_dim": multiplier}
        extra = self.number("rope.scaling.attn_factor", 1.0)
        if extra != 1.0 and factor > 1:
            scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
        return scaling

    def _longrope_fields(self, rotary_size: int, original_len: int, max_positions: int) -> dict[str, Any]:
        short, long = (self._read_frequency_divisors(f"rope_factors_{name}.weight", rotary_size) for name in ("short", "long"))
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "original_max_position_embeddings": original_len}
        ratio = max_positions / original_len
        default_factor = math.sqrt(1 + math.log(ratio) / math.log(original_len)) if ratio > 1 and original_len > 1 else 1.0
        attn_factor = self.number("rope.scaling.attn_factor", default_factor)
        if not math.isclose(attn_factor, default_factor, rel_tol=1e-6):  # the file's value is rounded to float32
            scaling["attention_factor"] = attn_factor
        return scaling

    def _fields_from_rope_freqs(self, theta: float, rotary_size: int, max_positions: int) -> dict[str, Any]:
        """Return rope fields for the divisors in `rope_freqs.weight`: type llama3 if its formula gives these divisors, else longrope."""
        divisors = self._read_frequency_divisors("rope_freqs.weight", rotary_size)
        factor = max(divisors)
        if factor > 1:
            rope = RopeConfig(float(theta), RopeType.LLAMA3, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
            plain = inverse_frequencies(RopeConfig(float(theta)), rotary_size)[0]
            if np.allclose(inverse_frequencies(rope, rotary_size)[0], plain / np.array(divisors, np.float32), rtol=1e-5, atol=0):
                return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE_FIELDS}
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": max_positions,
        }

    def _read_frequency_divisors(self, name: str, rotary_size: int) -> list[float]:
        divisors = [float(str(value)) for value in self.float32_vector(name, rotary_size // 2)]
        if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
            raise CheckpointError(f"{self.file.path}: {name} holds a value that is not finite and above 0; download the file again")
        return divisors
