"""A draft model: a small language model that begins as the first layers of the target, distilled from the target's distribution.

The embedding and the vocabulary matrix are the target's and are not trained; the layers and the last norm are. The model reads the tokens
of the text alone. Every answer position is trained with the cross-entropy with the target's distribution over the draft vocabulary.

Sources: DistillSpec (Zhou et al. 2023, arXiv:2310.08461) for distillation on the target's own answers; DistilBERT (Sanh et al. 2019,
arXiv:1910.01108, section 3) for copied layers. Deviation: the first layers, not evenly spaced ones. With four layers of SmolLM2-135M and 40
steps of 128 positions they are right at 20 % of held-out positions, evenly spaced ones at 11 %, because their inputs are those they were
trained with.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.layers import AttentionConfig, DenseMLP, LayerConfig, QKNorm
from paceline.models.rope_config import RopeType
from paceline.training.batches import Batch
from paceline.training.drafter import StepResult, TargetMatrices, TrainableDrafter, gather_rows, summed, token_at
from paceline.training.layers import FLATTENING, DecoderLayer, LayerSizes, RMSNorm, layer_tensors
from paceline.training.losses import CHUNK_ROWS
from paceline.training.settings import TrainSettings
from paceline.training.vocabulary import DraftVocabulary

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_KEYS: Mapping[RopeType, tuple[tuple[str, str], ...]] = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: (("factor", "factor"),),
    RopeType.LLAMA3: (
        ("factor", "factor"),
        ("low_freq_factor", "low_freq_factor"),
        ("high_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings", "original_max_positions"),
    ),
}
"""Keys of config.json by rope type, with our names."""


class TrainableDraftModel(TrainableDrafter):
    """A language model that `drafters/draft_model.py` runs as any other."""

    depth = 5
    lm_head: Tensor

    def __init__(self, target: TargetMatrices, vocabulary: DraftVocabulary, settings: TrainSettings) -> None:
        super().__init__(target, vocabulary, settings)
        config, sizes = target.config, model_sizes(target.config)
        self.sizes, self.layers = sizes, nn.ModuleList()
        for index in range(settings.num_layers or 1):
            layer = DecoderLayer(sizes, sizes.hidden_size, settings.max_tokens)
            layer.start_from(layer_tensors(target.weights, index), damping=1.0)
            self.layers.append(layer)
        self.norm = RMSNorm(sizes.hidden_size, sizes.norm_eps)
        with torch.no_grad():  # unflattened, 31 % of SmolLM2's drafts are outside the draft vocabulary after 40 steps, else 2 %
            self.norm.weight.copy_(FLATTENING * target.final_norm())
        matrix = self.embedding if config.tied_embeddings else target.lm_head(np.arange(config.vocab_size))
        self.register_buffer("lm_head", matrix, persistent=False)

    @classmethod
    def check_target(cls, target: ModelConfig, settings: TrainSettings) -> None:
        count = settings.num_layers or 1
        if count > target.num_layers:
            raise ConfigError(f"num_layers is {count}: use 1 to {target.num_layers}, the layers of the target")
        if found := list(dict.fromkeys(_unsupported(target, count))):
            raise ConfigError(
                f"a draft model of {target.family} layers cannot be trained, because a Llama or Qwen model has no {', '.join(found)}: "
                "train another drafter, such as eagle3"
            )

    def outputs(self, batch: Batch) -> Tensor:
        """Return the normed rows [B, N, E] of the roots. A row predicts the token after its root."""
        places = rows = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device).expand_as(batch.token_ids)
        x = self.embedding[batch.token_ids]
        for number, layer in enumerate(one for one in self.layers if isinstance(one, DecoderLayer)):
            normed = layer.input_layernorm(x)
            context = layer.self_attn.keys_values(normed, places)
            if number == len(self.layers) - 1:  # in the last layer, only the roots' rows are needed
                x, normed, rows = gather_rows(x, batch.roots), gather_rows(normed, batch.roots), batch.roots
            x = x + layer.self_attn(normed[:, :, None], rows[:, :, None], context, rows + 1, None)[:, :, 0]
            x = layer.feed_forward(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def step(self, batch: Batch, generator: torch.Generator) -> StepResult:
        targets = self.targets(batch)
        return summed([self.score(self.outputs(batch), self.teacher, batch, targets, batch.roots + 1, batch.is_root)])

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        rows, matrix = self.outputs(batch)[batch.is_root].to(self.dtype), self.lm_head.to(self.dtype)
        best = torch.cat([(part @ matrix.T).argmax(-1) for part in torch.split(rows, CHUNK_ROWS)])
        is_right = best == token_at(batch, batch.roots + 1)[batch.is_root]  # indexed by label: each label has one root, in the same order
        labels = batch.labels_at(batch.roots[..., None] + 1 + torch.arange(self.depth, device=best.device))
        return (labels >= 0) & batch.is_root[..., None] & is_right[labels.clamp(min=0)]

    def export(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        target, sizes = self.target.config, self.sizes.config()
        tensors = {f"model.layers.{own}": values for own, values in self.layers.state_dict().items()}
        tensors |= {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        tensors |= {} if target.tied_embeddings else {"lm_head.weight": self.lm_head}
        rope = self.sizes.rope
        scaling = {"rope_type": rope.type.value, **{key: getattr(rope, own) for key, own in _ROPE_KEYS[rope.type]}}
        config = {
            **sizes,
            "architectures": [_ARCHITECTURES[str(sizes["model_type"])]],
            "num_hidden_layers": len(self.layers),
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_positions,
            "rope_scaling": None if rope.type is RopeType.DEFAULT else scaling,
            "tie_word_embeddings": target.tied_embeddings,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": list(target.eos_token_ids) or None,
            "torch_dtype": "bfloat16",
            "base_model_name_or_path": name,
        }
        return config, tensors


def model_sizes(target: ModelConfig) -> LayerSizes:
    """Return the sizes of a draft model's layers, with the rotary settings of the target."""
    attention = list(target.attention_layers.values())[-1]  # the same layer as in `LayerSizes.of_target`
    return replace(LayerSizes.of_target(target), rope=attention.rope, has_bias=attention.bias and attention.qk_norm is QKNorm.NONE)


def _unsupported(target: ModelConfig, count: int) -> Iterator[str]:
    """Yield what a target has and a draft model cannot have."""
    for name, neutral in (("embedding_scale", 1.0), ("has_embedding_norm", False), ("logit_scale", 1.0), ("logit_soft_cap", None)):
        if (value := getattr(target, name)) != neutral:
            yield f"{name} = {value}"
    sizes = model_sizes(target)
    rope = sizes.rope
    if rope.type not in _ROPE_KEYS or rope.rotated_fraction != 1.0 or rope.attention_temperature_scale != 0.0:
        temperature = rope.attention_temperature_scale
        yield f"rope type {rope.type.value} with rotated_fraction = {rope.rotated_fraction:g} and temperature = {temperature:g}"
    attention = AttentionConfig(
        num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads, head_size=sizes.head_size, rope=sizes.rope,
        scale=sizes.head_size**-0.5, bias=sizes.has_bias, qk_norm=QKNorm.HEAD if sizes.has_qk_norm else QKNorm.NONE,
    )  # fmt: skip
    usual_layer = LayerConfig(mixer=attention, mlp=DenseMLP(intermediate_size=sizes.intermediate_size))
    for layer in target.layers[:count]:
        for part, usual in ((layer, usual_layer), (layer.mixer, usual_layer.mixer), (layer.mlp, usual_layer.mlp)):
            yield from _differences(part, usual)


def _differences(part: Any, usual: Any, prefix: str = "") -> Iterator[str]:
    """Yield the values of a part of a layer that a draft model's layers do not have. Windows are left out: it attends to all rows."""
    if type(part) is not type(usual):
        yield f"{prefix}{type(part).__name__}"
        return
    for name in (field.name for field in fields(part) if field.name not in ("mixer", "mlp", "window")):
        value, usual_value = getattr(part, name), getattr(usual, name)
        if is_dataclass(usual_value):
            yield from _differences(value, usual_value, f"{prefix}{name}.")
        elif value != usual_value:
            yield f"{prefix}{name}" if is_dataclass(value) else f"{prefix}{name} = {value.value if isinstance(value, Enum) else value}"
