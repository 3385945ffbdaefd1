"""A GGUF file's metadata in the terms of a Hugging Face config.json, from which `models/config.py` makes a network."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, shortened
from paceline.models.config import ModelConfig, WeightType, config_from_values
from paceline.models.families import FAMILIES
from paceline.models.gguf.fields import GgufFields
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.gemma4 import ASSISTANTS, gemma4_values
from paceline.models.gguf.hybrids import HYBRIDS, NEMOTRONS, hybrid_values
from paceline.models.gguf.terms import in_its_terms
from paceline.models.rope import inverse_frequencies
from paceline.models.rope_config import RopeConfig, RopeType

_FAMILY_OF = {family.gguf: family.name for family in FAMILIES.values() if family.gguf is not None}
_FAMILY_OF["nemotron_h_moe"] = "nemotron_h"
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of rotary frequencies, which are part of the configuration."""

_STORED_AS = {"F16": WeightType.F16, "BF16": WeightType.BF16}
_SOFTMAX, _SIGMOID, _OF_CHOSEN = 1, 2, 3  # llama.cpp's numbers of what makes a router's logits weights
_OTHER_EPSILON = dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "attention.layer_norm_epsilon")
"""What llama.cpp reads of them; converters write both."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_UNTIED = ("gpt-oss", "qwen2moe", "olmoe", "olmo2")
"""Architectures whose files have a vocabulary matrix: without one they are damaged, as for llama.cpp. In others it is the embedding."""

_QUERY_SCALAR_IS_WIDTH = {"gemma2": 46, "gemma3": 62}  # the 27B models, known by their number of layers


def gguf_config(file: GgufFile) -> ModelConfig:
    """The network a GGUF file holds. Quantised matrices are computed in float32, which has room for all their values.

    Raises:
        CheckpointError: a value is missing or absurd, or the network is not one we run.
    """
    generation = {"suppress_tokens": file.metadata.get("tokenizer.ggml.suppress_tokens")}
    values = _Reader(file).values()
    try:
        return config_from_values(values, file.path, generation=generation, weight_type=_weight_type(file))
    except CheckpointError as error:
        raise in_its_terms(error, file.metadata["general.architecture"]) from None


def _weight_type(file: GgufFile) -> WeightType:
    """The type most bytes are stored in."""
    num_bytes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        num_bytes[tensor.block_type.name] += tensor.data.nbytes
    return _STORED_AS.get(num_bytes.most_common(1)[0][0] if num_bytes else "", WeightType.F32)


class _Reader(GgufFields):
    """The values of one file."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file)
        if self.architecture in ASSISTANTS:
            raise CheckpointError(
                f"{file.path} holds an assistant, which guesses for a model of its own: name it as the drafter beside that"
            )
        if not isinstance(self.architecture, str) or self.architecture not in _FAMILY_OF:
            raise CheckpointError(
                f"{file.path} holds architecture {shortened(self.architecture)}, which is not supported; "
                f"supported are {', '.join(_FAMILY_OF)}"
            )

    def values(self) -> dict[str, Any]:
        """What config.json would say."""
        hidden_size, num_heads = self.count("embedding_length"), self.of_all_layers("attention.head_count")
        head_size = self._head_size(hidden_size, num_heads)
        max_positions = self.count("context_length")
        values: dict[str, Any] = {
            "model_type": _FAMILY_OF[self.architecture],
            "vocab_size": self._vocab_size(hidden_size),
            "hidden_size": hidden_size,
            "intermediate_size": self.of_all_layers("feed_forward_length", self.of_model("expert_feed_forward_length")),
            "num_hidden_layers": self._num_layers(),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.of_all_layers("attention.head_count_kv", num_heads),
            "head_dim": head_size,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon", self.of_model(_OTHER_EPSILON.get(self.architecture, ""))),
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": not self.has("output.weight") and self.architecture not in _UNTIED,
            "attention_bias": self.has("blk.0.attn_q.bias"),
            "attention_out_bias": self.has("blk.0.attn_output.bias"),
            "mlp_bias": self.has("blk.0.ffn_gate.bias"),
            "bos_token_id": self.plain("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._end_token_ids(),
        }
        if self.architecture == "gemma4":
            return values | gemma4_values(self.file, values["num_hidden_layers"])
        values |= {} if self.architecture in NEMOTRONS else self._rope(head_size, max_positions)  # these do not rotate
        if self.architecture in HYBRIDS:
            values |= hybrid_values(self, values)
            return values | (self._multipliers(head_size) if self.architecture == "granitehybrid" else {})
        if self.architecture.startswith("gemma"):
            values |= self._gemma(hidden_size, num_heads, head_size)
        elif self.of_model("expert_count"):
            values |= self._experts(values)
        elif self.architecture == "phi3":
            values["sliding_window"] = self.of_model("attention.sliding_window") or None  # 0 = none
        elif self.architecture in ("olmo2", "exaone4"):
            values |= self._windows(values["rope_theta"])
        elif self.architecture == "granite":
            values |= self._granite(head_size)
        elif self.architecture == "mistral3":
            values["rope_parameters"] = self._tempered(values)
        elif self.architecture == "glm4" and (sections := self.of_model("rope.dimension_sections")) is not None:
            self.refuse("rope.dimension_sections", sections, "none: images are not read")
        return values

    def _head_size(self, hidden_size: int, num_heads: int) -> int:
        size = self.count("attention.key_length", max(hidden_size // num_heads, 1))
        value_size = self.count("attention.value_length", size)
        if size != value_size:
            self.refuse("attention.value_length", value_size, f"the size of keys, {size}")
        return size

    def _num_layers(self) -> int:
        """Checked against the tensors, because everything per layer is built from it."""
        num_layers = self.count("block_count")
        if num_layers > len(self.file.tensors):
            self.refuse("block_count", num_layers, f"at most as many as the file has tensors, {len(self.file.tensors)}")
        return num_layers

    def _vocab_size(self, hidden_size: int) -> int:
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2 or table.shape[1] != hidden_size:
            found = "is missing" if table is None else f"has shape {list(table.shape)}"
            raise CheckpointError(
                f"{self.file.path}: token_embd.weight {found}, expected [vocabulary, {hidden_size}]; is this a language model's file?"
            )
        return table.shape[0]

    def _end_token_ids(self) -> list[Any]:
        """The ids named as an end. The config reader checks them; one outside the vocabulary is never drawn."""
        ids = [self.plain(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return [token_id for index, token_id in enumerate(ids) if token_id is not None and token_id not in ids[:index]]

    def _rope(self, head_size: int, max_positions: int) -> dict[str, Any]:
        theta = self.number("rope.freq_base", 10000.0)
        rotated = self.count("rope.dimension_count", head_size)
        if rotated > head_size:
            self.refuse("rope.dimension_count", rotated, f"at most the head size, {head_size}")
        values = {"rope_theta": theta, "partial_rotary_factor": rotated / head_size}
        original = self.count("rope.scaling.original_context_length", max_positions)
        scaling = self._scaling(theta, rotated, original, max_positions)
        if scaling is None:
            return values
        original = scaling.get("original_max_position_embeddings", original)
        return {**values, "rope_scaling": scaling, "original_max_position_embeddings": original}

    def _scaling(self, theta: float, rotated: int, original: int, max_positions: int) -> dict[str, Any] | None:
        kind = self.of_model("rope.scaling.type") or "none"
        factor = self.number("rope.scaling.factor", 1.0)
        if self.has("rope_factors_short.weight") or self.has("rope_factors_long.weight"):
            return self._longrope(rotated, original, max_positions)
        if self.has("rope_freqs.weight"):
            if kind != "none":
                raise CheckpointError(
                    f"{self.file.path}: rope_freqs.weight together with rope.scaling.type = {shortened(kind)} is not supported"
                )
            return self._frequency_factors(theta, rotated, max_positions)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return self._yarn(factor, original)
        raise CheckpointError(
            f"{self.file.path}: rope.scaling.type = {shortened(kind)} is not supported, only none, linear, yarn and longrope are"
        )

    def _yarn(self, factor: float, original: int) -> dict[str, Any]:
        betas = {name: self.of_model(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
        if (multiplier := self.of_model("rope.scaling.yarn_log_multiplier")) is not None:
            return {**scaling, "mscale": 1.0, "mscale_all_dim": multiplier}
        extra = self.number("rope.scaling.attn_factor", 1.0)
        if extra != 1.0 and factor > 1:
            scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
        return scaling

    def _longrope(self, rotated: int, original: int, max_positions: int) -> dict[str, Any]:
        short, long = (self._divisors(f"rope_factors_{name}.weight", rotated) for name in ("short", "long"))
        scaling = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        ratio = max_positions / original
        implied = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
        stated = self.number("rope.scaling.attn_factor", implied)
        if not math.isclose(stated, implied, rel_tol=1e-6):  # the file holds the implied one rounded to float32
            scaling["attention_factor"] = stated
        return scaling

    def _frequency_factors(self, theta: float, rotated: int, max_positions: int) -> dict[str, Any]:
        """Llama 3's rule if the stored divisors are its values in float32; else the divisors themselves."""
        divisors = self._divisors("rope_freqs.weight", rotated)
        factor = max(divisors)
        if factor > 1:
            rope = RopeConfig(float(theta), RopeType.LLAMA3, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
            plain = inverse_frequencies(RopeConfig(float(theta)), rotated)[0]
            if np.allclose(inverse_frequencies(rope, rotated)[0], plain / np.array(divisors, np.float32), rtol=1e-5, atol=0):
                return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": max_positions,
        }

    def _divisors(self, name: str, rotated: int) -> list[float]:
        tensor = self.file.tensors.get(name)
        if tensor is None or tensor.block_type.name != "F32" or tensor.shape != (rotated // 2,):
            found = "is missing" if tensor is None else f"is of type {tensor.block_type.name} and shape {list(tensor.shape)}"
            raise CheckpointError(f"{self.file.path}: {name} {found}, expected F32 of shape [{rotated // 2}]; download the file again")
        divisors = [float(str(value)) for value in tensor.data.view("<f4")]
        if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
            raise CheckpointError(f"{self.file.path}: {name} holds a number that is not above 0; download the file again")
        return divisors

    def _tempered(self, values: dict[str, Any]) -> dict[str, Any]:
        """Rope parameters with the temperature of queries, whose length is that of the scaling."""
        original, length = values.get("original_max_position_embeddings"), self.of_model("attention.temperature_length")
        beta = self.of_model("attention.temperature_scale") or 0.0
        if beta and length not in (None, original):
            self.refuse("attention.temperature_length", length, f"the original context length, {original}")
        return {"rope_theta": values["rope_theta"], **(values.pop("rope_scaling", None) or {}), "llama_4_scaling_beta": beta}

    def _experts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the format leaves out follows from the architecture, as in llama.cpp."""
        is_normalized = self.of_model("expert_weights_norm")
        found = {
            "num_experts": self.count("expert_count"),
            "num_experts_per_tok": self.count("expert_used_count"),
            "moe_intermediate_size": self.count("expert_feed_forward_length", values["intermediate_size"]),
            "norm_topk_prob": self.architecture == "qwen3moe" if is_normalized is None else is_normalized,
        }
        gating = _SOFTMAX if self.architecture != "glm4moe" else _SIGMOID
        if self.of_model("expert_gating_func") not in (None, 0, gating, _OF_CHOSEN if self.architecture == "gpt-oss" else gating):
            self.refuse("expert_gating_func", self.of_model("expert_gating_func"), str(gating))
        if self.architecture == "llama":
            return {**found, "model_type": "mixtral", "intermediate_size": found["moe_intermediate_size"]}
        if self.architecture == "qwen2moe":
            shared = self.count("expert_shared_feed_forward_length", self.rows_of("blk.0.ffn_gate_shexp.weight"))
            return {**found, "shared_expert_intermediate_size": shared}
        if self.architecture == "gpt-oss":
            scaling = values.get("rope_scaling")
            return {
                **found,
                "sliding_window": self.count("attention.sliding_window"),
                **self._sliding_layers(),
                "intermediate_size": found["moe_intermediate_size"],
                **({} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}),
            }
        if self.architecture == "olmoe":
            return {**found, "intermediate_size": found["moe_intermediate_size"]}
        return found | (self._glm4_moe(values) if self.architecture == "glm4moe" else {})

    def _glm4_moe(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "num_hidden_layers": self.without_modules(values["num_hidden_layers"]),
            "first_k_dense_replace": self.of_model("leading_dense_block_count") or 0,
            "n_shared_experts": self.of_model("expert_shared_count") or 0,
            "n_group": self.count("expert_group_count", 1),
            "topk_group": self.count("expert_group_used_count", 1),
            "routed_scaling_factor": self.number("expert_weights_scale", 1.0),
            "use_qk_norm": self.has("blk.0.attn_q_norm.weight"),
        }

    def _granite(self, head_size: int) -> dict[str, Any]:
        rotates = self.of_model("rope.scaling.finetuned")
        if rotates is not None and not rotates:  # llama.cpp's mark of layers that do not rotate
            self.refuse("rope.scaling.finetuned", rotates, "true")
        return self._multipliers(head_size)

    def _multipliers(self, head_size: int) -> dict[str, Any]:
        """Of Granite."""
        return {
            "embedding_multiplier": self.number("embedding_scale", 1.0),
            "attention_multiplier": self.number("attention.scale", head_size**-0.5),
            "residual_multiplier": self.number("residual_scale", 1.0),
            "logits_scaling": self.number("logit_scale"),
        }

    def _sliding_layers(self) -> dict[str, Any]:
        """Which layers slide: a list, or every how many-th does not; None = what the family assumes."""
        pattern = self.of_model("attention.sliding_window_pattern")
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:  # 0 = all slide
            pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(self._num_layers())]
        if pattern is None:
            return {}
        if not isinstance(pattern, list):
            self.refuse("attention.sliding_window_pattern", pattern, "whether each layer slides")
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}

    def _windows(self, theta: float) -> dict[str, Any]:
        """Files of OLMo 3 say olmo2 and have a window."""
        window = self.of_model("attention.sliding_window") or None  # 0 = none
        given = self._sliding_layers()
        if window is None:
            if "sliding_attention" in given.get("layer_types", ()):
                self.refuse("attention.sliding_window", window, "the window of the layers that attention.sliding_window_pattern names")
            return {"sliding_window": None}
        family = {"model_type": "olmo3", "rope_local_base_freq": theta} if self.architecture == "olmo2" else {}
        return {"sliding_window": window, **given, **family}

    def _gemma(self, hidden_size: int, num_heads: int, head_size: int) -> dict[str, Any]:
        """The format leaves out what llama.cpp hard-codes: the scale of attention scores and which layers slide."""
        is_wide = self.of_model("block_count") == _QUERY_SCALAR_IS_WIDTH[self.architecture]
        values: dict[str, Any] = {"query_pre_attn_scalar": hidden_size // num_heads if is_wide else head_size}
        given = {
            **self._sliding_layers(),
            "sliding_window": self.of_model("attention.sliding_window"),
            "rope_local_base_freq": self.of_model("rope.freq_base_swa"),
        }
        if self.architecture == "gemma2":
            given["attn_logit_softcapping"] = self.of_model("attn_logit_softcapping")
            given["final_logit_softcapping"] = self.of_model("final_logit_softcapping")
        return values | {name: value for name, value in given.items() if value is not None}
