"""Weights of a block drafter under the names of `network.py`, from safetensors, PyTorch or GGUF files."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.block.config import (
    CONVOLUTIONS,
    SELECTOR,
    SINKS,
    BlockConfig,
    MarkovKind,
    config_fields,
    is_neox,
    with_plain_names,
)  # fmt: skip
from paceline.drafters.head_files import HeadFiles, target_ids_of
from paceline.errors import CheckpointError, shortened
from paceline.models.checkpoint import is_gguf
from paceline.models.config import ModelConfig, WeightType
from paceline.models.layers import DenseMLP, LayerConfig, NormOrder, QKNorm
from paceline.models.storage.tensor_file import read_torch_file
from paceline.models.weights import AnyTensor, Tensor, Weights, as_float32, take_rows

Shapes = dict[str, tuple[int, ...]]
MASK_FILE = "mask_embedding.pt"
_PARTS = {
    **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")},
}
_NORMS = {
    NormOrder.PRE: {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    NormOrder.SANDWICH: {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_output_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    },
}
_WHOLE = {
    **dict.fromkeys(SINKS, "attention.sinks"),
    "layer_scalar": "output_scale.weight",
    **{
        f"{part}.kernel_projection.weight": f"{ours}_kernels.weight"
        for part, ours in zip(CONVOLUTIONS, ("attention_convolution", "mlp_convolution"), strict=True)
    },
    **{
        f"{part}.base_kernel": f"{ours}_base.weight"
        for part, ours in zip(CONVOLUTIONS, ("attention_convolution", "mlp_convolution"), strict=True)
    },
}
"""Our names of tensors of a layer that have no module of ours."""
_OURS = {
    "norm": "final_norm",
    "embed_tokens": "embedding",
    "markov_head.markov_w2": "markov_output",
    SELECTOR + "hidden_projection": "selector",
}
_CODEBOOKS = ("predecessor_codebook", "successor_codebook")
_TABLES = {
    "markov_head.markov_w1.weight": "markov_w1",
    SELECTOR + "predecessor_codebook": "predecessor",
    SELECTOR + "successor_codebook": "successor",
}
_SMALL = {"markov_head.gate_proj": "gate", "markov_head.joint_proj": "joint", "confidence_head.proj": "confidence"}


@dataclass(frozen=True, slots=True)
class BlockCheckpoint:
    """An opened block drafter.

    Attributes:
        weights: of its networks, under the names of `network.py`; without lm_head if that is the target's.
        tables: matrices with a row for each token id, of which single rows are read: `markov_w1` [V, r]; `predecessor`, `successor` [V, r].
            `successor` may have a row for each draft id instead.
        small: float32 matrices that NumPy multiplies: `gate`, `joint`, `confidence`, with biases.
        mask_embedding: [E] embedding of the mask token; None = the target's row.
        target_ids: [Vd] the target's id of each draft id, ascending; None = the same.
    """

    config: BlockConfig
    weights: Weights
    tables: Mapping[str, AnyTensor]
    small: Mapping[str, NDArray[np.float32]]
    mask_embedding: NDArray[np.float32] | None
    target_ids: NDArray[np.int64] | None


def open_block(files: HeadFiles, config: BlockConfig, target: ModelConfig, *, num_threads: int = 1) -> BlockCheckpoint:
    """Open the weights and the draft vocabulary.

    Args:
        num_threads: for the conversion of a GGUF file's matrices.

    Raises:
        CheckpointError: tensors are missing, of another shape, or unknown; all of them are named.
    """
    files = with_plain_names(files)
    required, optional, dropped = _shapes(files, config)
    files.check(required, optional)
    used = [name for name in (*required, *optional) if name in files.tensors]
    files.check_all_used([*used, *dropped])
    small = {name for name in used if name.rpartition(".")[0] in _SMALL}
    tensors = {_our_name(name, config): files.matrix(name, num_threads) for name in used if name not in small and name not in _TABLES}
    for name in [name for name in tensors if name.endswith("_base.weight")]:  # [2, taps, E] becomes a vector
        tensors[name] = _flattened(tensors[name])
    if not is_neox(config_fields(files)):
        _interleaved_to_halves(tensors, config.layers)
    return BlockCheckpoint(
        config,
        Weights(tensors),
        {table: files.matrix(name, num_threads) for name, table in _TABLES.items() if name in used},
        {_small_name(name): as_float32(files.matrix(name)) for name in small},
        None if is_gguf(files.path) else _read_mask_embedding(files.config_path.with_name(MASK_FILE), config),
        target_ids_of(files, config.layers.vocab_size, target),
    )


def _flattened(tensor: AnyTensor) -> Tensor:
    values = np.ascontiguousarray(as_float32(tensor)).reshape(-1)
    return Tensor(values, WeightType.F32, values.shape)


def _read_mask_embedding(path: Path, config: BlockConfig) -> NDArray[np.float32] | None:
    """Return the embedding of the mask token that replaces the target's row, [E]; None = there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
        BackendUnavailableError: torch is not installed.
    """
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file, expected the embedding of the mask token; download it again")
    content: Any = read_torch_file(path, "mask embedding")
    row: Any = content.get("embedding") if isinstance(content, dict) else None
    if not hasattr(row, "numel") or not content.keys() <= {"embedding", "mask_token_id"}:
        held = shortened(sorted(map(str, content))) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} holds {held}, expected a tensor 'embedding' and a 'mask_token_id'; download it again")
    token_id = content.get("mask_token_id", config.mask_token_id)
    token_id = token_id.item() if hasattr(token_id, "numel") and token_id.numel() == 1 else token_id
    if not isinstance(token_id, int) or token_id != config.mask_token_id:
        raise CheckpointError(
            f"{path} is for mask_token_id {shortened(token_id)}, config.json has {config.mask_token_id}: one of the two belongs to "
            "another drafter"
        )
    if row.numel() != config.layers.hidden_size or not row.is_floating_point():
        raise CheckpointError(
            f"{path} holds a row of {row.numel()} values, expected {config.layers.hidden_size} numbers; download it again"
        )
    return np.asarray(row.detach().float().reshape(-1).numpy(), np.float32)


def _interleaved_to_halves(tensors: dict[str, AnyTensor], layers: ModelConfig) -> None:
    """Reorder query and key rows so that neighbouring pairs become pairs of halves."""
    for layer, mixer in layers.attentions.items():
        size, rotated = mixer.head_size, mixer.rope.rotary_size(mixer.head_size)
        own = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, size)])
        for part, heads in (("q", mixer.num_heads), ("k", mixer.num_kv_heads)):
            rows = (np.arange(heads)[:, None] * size + own).reshape(-1)
            for name, order in ((f"{part}_proj.weight", rows), (f"{part}_proj.bias", rows), (f"{part}_norm.weight", own)):
                stored = tensors.get(f"layers.{layer}.{name}")
                if stored is not None:
                    tensors[f"layers.{layer}.{name}"] = take_rows(stored, order)


def _shapes(files: HeadFiles, config: BlockConfig) -> tuple[Shapes, Shapes, Sequence[str]]:
    """Return the required tensors, the optional ones, and the names of unused ones, such as copies of the target's."""
    layers, hidden = config.layers, config.layers.hidden_size
    required: Shapes = {
        "fc.weight": (hidden, config.feature_size * len(config.boundaries)), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    optional: Shapes = {"fc.bias": (hidden,)}
    for index, layer in enumerate(layers.layers):
        _add_layer(files, f"layers.{index}.", layer, hidden, required, optional)
    if config.own_lm_head:
        required["lm_head.weight"] = (layers.vocab_size, hidden)
    if config.own_embedding:
        required["embed_tokens.weight"] = (_rows(files, "embed_tokens.weight"), hidden)
    rank = (files.shape("markov_head.markov_w1.weight") or (0, 0))[1]
    if config.markov is not None:
        embedded = _rows(files, "markov_head.markov_w1.weight")
        required |= {"markov_head.markov_w1.weight": (embedded, rank), "markov_head.markov_w2.weight": (layers.vocab_size, rank)}
    if config.markov is MarkovKind.GATED:
        required |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.markov is MarkovKind.RNN:
        required |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden), "markov_head.joint_proj.bias": (3 * rank,)}
    if config.has_confidence:
        width = hidden + (rank if config.confidence_reads_token else 0)
        required["confidence_head.proj.weight"], optional["confidence_head.proj.bias"] = (1, width), (1,)
    if config.num_candidates:
        rank, before, after = (_rows(files, SELECTOR + name) for name in ("hidden_projection.weight", *_CODEBOOKS))
        required[SELECTOR + "hidden_projection.weight"] = (rank, hidden)
        required[SELECTOR + _CODEBOOKS[0]] = (before, rank)
        required[SELECTOR + _CODEBOOKS[1]] = (after if after == layers.vocab_size and "d2t" in files.tensors else before, rank)
    copies = {"embed_tokens.weight": config.own_embedding, "lm_head.weight": config.own_lm_head}
    dropped = ["d2t", "t2d", *(name for name, is_own in copies.items() if not is_own)]
    return required, optional, dropped


def _rows(files: HeadFiles, name: str) -> int:
    return (files.shape(name) or (0, 0))[0]


def _add_layer(files: HeadFiles, prefix: str, layer: LayerConfig, hidden: int, required: Shapes, optional: Shapes) -> None:
    """Add the tensors of a decoder layer."""
    mixer, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, DenseMLP)  # config.py makes no others
    inner = mlp.intermediate_size
    matrices = {
        "self_attn.q_proj": (mixer.query_size, hidden), "self_attn.k_proj": (mixer.kv_size, hidden),
        "self_attn.v_proj": (mixer.kv_size, hidden), "self_attn.o_proj": (hidden, mixer.query_size),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    if mixer.keys_are_values:
        del matrices["self_attn.v_proj"]
    for name, shape in matrices.items():
        required[f"{prefix}{name}.weight"] = shape
        optional[f"{prefix}{name}.bias"] = shape[:1]
    required |= {f"{prefix}{name}.weight": (hidden,) for name in _NORMS[layer.norm_order]}
    if mixer.qk_norm is QKNorm.HEAD:
        required |= {f"{prefix}self_attn.{name}.weight": (mixer.head_size,) for name in ("q_norm", "k_norm")}
    if mixer.has_sinks:
        required |= {prefix + name: (mixer.num_heads,) for name in SINKS if prefix + name in files.tensors}
    if layer.scales_output:
        required[prefix + "layer_scalar"] = (1,)
    if layer.convolution is not None:
        size, groups = layer.convolution.kernel_size, hidden // layer.convolution.group_size
        for part in CONVOLUTIONS:
            required[f"{prefix}{part}.base_kernel"] = (2, size, hidden)
            required[f"{prefix}{part}.kernel_projection.weight"] = (2 * size * groups, hidden)


def _our_name(name: str, config: BlockConfig) -> str:
    """Return the name of a tensor of the file in `network.py`."""
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        if part in _WHOLE:
            return f"layers.{layer}.{_WHOLE[part]}"
        stem, kind = part.rsplit(".", 1)
        names = {**_PARTS, **_NORMS[config.layers.layers[int(layer)].norm_order]}
        return f"layers.{layer}.{names[stem]}.{kind}"
    stem, kind = name.rsplit(".", 1)
    return f"{_OURS.get(stem, stem)}.{kind}"


def _small_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    return _SMALL[stem] if kind == "weight" else f"{_SMALL[stem]}_bias"
