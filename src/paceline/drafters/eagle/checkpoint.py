"""EAGLE heads as they are stored: the weights under our names, and the draft vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.eagle.config import EagleConfig, holds_norm, is_left_out
from paceline.drafters.eagle.layout import our_name, plain_files
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig
from paceline.models.layers import DenseMLP, LayerConfig, QKNorm
from paceline.models.weights import AnyTensor, Tensor, Weights, as_float32

Shapes = dict[str, tuple[int, ...]]
_MASK = "mask_hidden"


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """An opened head.

    Attributes:
        weights: under the names of `network.py`; without an embedding or `lm_head` shared with the target.
        embedded_ids: token ids from here on have no embedding.
        target_ids: [Vd] the target's id of each draft id, ascending; None = the same.
        mask_feature: [F] P-EAGLE: the feature of masked positions.
    """

    config: EagleConfig
    weights: Weights
    embedded_ids: int
    target_ids: NDArray[np.int64] | None
    mask_feature: NDArray[np.float32] | None = None


def open_eagle(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> EagleCheckpoint:
    """The weights and the draft vocabulary.

    Raises:
        CheckpointError: tensors are missing or of another shape, or there are some that no such head has; all of them are named.
        IncompatibleDrafterError: its vocabulary is not the target's, or its mask token is not in it.
    """
    files = plain_files(files)
    required, optional = _shapes(files, config, target)
    files.check(required, optional)
    used = [name for name in (*required, *optional) if name in files.tensors]
    tables = ("token_map",) if config.is_first else ("d2t", "t2d")
    files.check_all_used([*used, *tables], ignored=lambda name: is_left_out(files, name))
    tensors: dict[str, AnyTensor] = {our_name(name): files.weight(name) for name in used if name != _MASK}
    mask = as_float32(files.weight(_MASK)).reshape(-1) if _MASK in used else None
    ids = target_ids_of(files, config.layers.vocab_size, target)
    if "token_map" in files.tensors:
        tensors["lm_head.weight"], ids = _mapped_rows(files, files.weight("lm_head.weight"), _token_map(files, target))
    embedded_ids = tensors["embedding.weight"].shape[0] if config.own_embedding else target.vocab_size
    if config.mask_token_id is not None and config.mask_token_id >= embedded_ids:
        raise IncompatibleDrafterError(
            f"{files.path}: the mask_token_id is {config.mask_token_id}, embeddings end at {embedded_ids}: the head was made for "
            "another model, or the drafter option 'mask_token_id' names another one"
        )
    return EagleCheckpoint(config, Weights(tensors), embedded_ids, ids, mask)


def check_embedded(files: HeadFiles, embedded_ids: int, num_known: int) -> None:
    """Refuse a head without embeddings for all ids of the target's tokenizer; padding ids need none.

    Args:
        embedded_ids: token ids from here on have no embedding.
        num_known: ids of the target's tokenizer that its vocabulary has rows for.

    Raises:
        IncompatibleDrafterError: there are fewer.
    """
    if embedded_ids < num_known:
        raise IncompatibleDrafterError(
            f"the {files.kind.value} head {files.path} has embeddings of {embedded_ids} token ids, the target's tokenizer knows "
            f"{num_known}: it was made for another model"
        )


def _shapes(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> tuple[Shapes, Shapes]:
    """Tensors that the network needs, and those it uses if present."""
    layers = config.layers
    hidden, width = layers.hidden_size, config.num_features
    required: Shapes = {}
    optional: Shapes = {}
    if config.is_first:
        required["fc.weight"] = (hidden, 2 * hidden)
        optional["fc.bias"] = (hidden,)
        if config.norms_embedding:
            required["embedding_layernorm.weight"] = (hidden,)
        if config.norms_feature:
            required["hidden_states_layernorm.weight"] = (hidden,)
    else:
        if config.has_fc:
            required["fc.weight"] = (hidden, width)
            optional["fc.bias"] = (hidden,)
        required["layers.0.hidden_norm.weight"] = (hidden,)
        if config.norms_features:
            required["input_norm.weight"] = (width,)
        if config.norms_chunks:
            required |= {f"fc_norm.{chunk}.weight": (config.feature_size,) for chunk in range(len(config.boundaries))}
    if holds_norm(files, config):
        required["norm.weight"] = (hidden,)
    if config.kind is HeadKind.PEAGLE:
        stored = files.tensors.get(_MASK)
        required[_MASK] = stored.shape if stored is not None and prod(stored.shape) == width else (1, 1, width)
    for layer in range(layers.num_layers):
        has_norm = layer > 0 or (config.norms_mixture if config.is_first else config.norms_embedding)
        is_joined = not config.is_first and layer == 0
        columns = 2 * hidden if is_joined else hidden
        _add_layer(layers.layers[layer], f"layers.{layer}.", required, optional, hidden=hidden, columns=columns, has_norm=has_norm)
    if config.own_embedding:
        required["embed_tokens.weight"] = ((files.shape("embed_tokens.weight") or (0, 0))[0], hidden)
    _add_lm_head(files, config, target, required)
    return required, optional


def _add_lm_head(files: HeadFiles, config: EagleConfig, target: ModelConfig, required: Shapes) -> None:
    layers = config.layers
    has_own_ids = layers.vocab_size != target.vocab_size or layers.hidden_size != target.hidden_size
    if "token_map" in files.tensors:
        required["lm_head.weight"] = ((files.shape("lm_head.weight") or (layers.vocab_size, 0))[0], layers.hidden_size)
    elif config.own_lm_head or (has_own_ids and not config.is_first):
        required["lm_head.weight"] = (layers.vocab_size, layers.hidden_size)


def _add_layer(layer: LayerConfig, prefix: str, required: Shapes, optional: Shapes, *, hidden: int, columns: int, has_norm: bool) -> None:
    """
    Args:
        columns: input width of q, k and v.
    """
    assert isinstance(layer.mlp, DenseMLP)  # read_layers makes no others
    attention, inner = layer.attention, layer.mlp.intermediate_size
    matrices = {
        "self_attn.q_proj": (attention.query_size, columns),
        "self_attn.k_proj": (attention.kv_size, columns),
        "self_attn.v_proj": (attention.kv_size, columns),
        "self_attn.o_proj": (hidden, attention.query_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for name, shape in matrices.items():
        required[f"{prefix}{name}.weight"] = shape
        optional[f"{prefix}{name}.bias"] = shape[:1]
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm") if has_norm else ("post_attention_layernorm",)
    required |= {f"{prefix}{name}.weight": (hidden,) for name in norms}
    if attention.qk_norm is QKNorm.HEAD:
        required |= {f"{prefix}self_attn.{name}.weight": (attention.head_size,) for name in ("q_norm", "k_norm")}


def target_ids_of(files: HeadFiles, size: int, target: ModelConfig) -> NDArray[np.int64] | None:
    """The target's id of each of `size` draft ids; None = the same.

    `d2t` holds offsets to add to draft ids; the sums ascend, and `t2d` marks the same ids.

    Raises:
        IncompatibleDrafterError: an id is not the target's.
        CheckpointError: the tables contradict each other.
    """
    if "d2t" not in files.tensors:
        return None
    offsets = files.table("d2t")
    if offsets.shape != (size,):
        raise CheckpointError(f"{files.path}: d2t has {list(offsets.shape)} entries for {size} rows of lm_head.weight; download it again")
    ids = np.arange(size) + offsets
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or np.any(np.diff(ids) <= 0)):
        raise IncompatibleDrafterError(
            f"{files.path}: d2t, which holds what to add to a draft id, gives ids from {ids.min()} to {ids.max()} that do not ascend "
            f"within the target's {target.vocab_size}: the head was made for another model, or its table holds ids in place of offsets"
        )
    if "t2d" in files.tensors:
        marked = np.flatnonzero(files.table("t2d"))
        if len(marked) and not np.array_equal(marked, ids):
            raise CheckpointError(f"{files.path}: d2t and t2d name different target ids; the file is damaged, download it again")
    return None if np.array_equal(ids, np.arange(target.vocab_size)) else ids


def _token_map(files: HeadFiles, target: ModelConfig) -> NDArray[np.int64]:
    """vLLM's form of a draft vocabulary: the target's ids themselves, in any order."""
    ids = files.table("token_map").reshape(-1)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(np.unique(ids)) < len(ids):
        span = f"from {ids.min()} to {ids.max()}" if len(ids) else "none"
        raise IncompatibleDrafterError(
            f"{files.path}: token_map has {len(ids)} ids, {span}, of the target's {target.vocab_size}, each at most once: "
            "the head was made for another model"
        )
    return ids


def _mapped_rows(files: HeadFiles, lm_head: Tensor, ids: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.int64]]:
    """The rows of the mapped ids, ascending; the matrix may hold these alone, or those of all ids."""
    order = np.argsort(ids)
    if lm_head.shape[0] != len(ids) and lm_head.shape[0] <= int(ids.max()):
        raise CheckpointError(
            f"{files.path}: token_map has {len(ids)} ids for {lm_head.shape[0]} rows of lm_head.weight; download it again"
        )
    rows = order if lm_head.shape[0] == len(ids) else ids[order]
    return Tensor(lm_head.array[rows], lm_head.weight_type, (len(ids), lm_head.shape[1])), ids[order]
