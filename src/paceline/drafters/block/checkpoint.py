"""Read block drafters from their files: the config of the network, and its weights under internal names.

A block drafter drafts a whole block in one pass: the last token and `block_size - 1` mask tokens attend to keys and values computed from
the target's hidden states. Sources: DFlash (z-lab `dflash/model.py`, speculators, SpecForge), DSpark (deepseek-ai/DeepSpec), Muse
Glimmer's assistant (transformers).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles, check_pairing, target_ids_of
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig, WeightType, check_frequencies
from paceline.models.families.table import FAMILIES
from paceline.models.json_fields import JsonFields
from paceline.models.layer_builder import ACTIVATIONS
from paceline.models.layers import AttentionConfig, DenseMLP, LayerConfig, QKNorm
from paceline.models.rope_config import read_rope
from paceline.models.storage.tensor_file import FileTensor, read_tensors
from paceline.models.weights import AnyTensor, Tensor, Weights, as_float32

BLOCK_KINDS = (HeadKind.DFLASH, HeadKind.DSPARK)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_TENSOR_NAME_ALIASES = {"midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_MUSE_GLIMMER_DEFAULTS = {
    "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49], "sliding_window": 2048, "is_causal": False,
    "rope_theta": 500000.0,
}  # fmt: skip
_UNSUPPORTED_KEYS = ("lilicorr", "conv_kernel_size", "selector_rank", "projector_type", "shared_kv")
"""Prefixes of config keys of network parts that are not supported; a drafter with one is refused."""
_UNSUPPORTED_ARCHITECTURES = ("Gemma4DSpark", "DeepseekV4DSpark", "LingDSpark", "Qwen3OmniDSpark")
_LAYER_TENSOR_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")},
}
_TENSOR_NAMES = {"norm": "final_norm", "embed_tokens": "embedding", "markov_head.markov_w2": "markov_output"}
_SINK_TENSOR_NAMES = ("self_attn.attention_sink_bias", "self_attn.sinks")


class MarkovKind(Enum):
    """The inputs of the Markov head of DSpark, which computes a bias on the logits."""

    VANILLA = "vanilla"  # input: the previous token
    GATED = "gated"  # input: the previous token and the hidden state of the row
    RNN = "rnn"  # input: all tokens drafted so far, through a recurrent state


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Config of a block drafter.

    Attributes:
        layers: its decoder layers; their `vocab_size` is the number of draft ids.
        feature_size: width of one of the target's hidden states.
        boundaries: the target's layer boundaries whose hidden states it reads, in the order of concatenation; b = the input of layer b.
        block_size: maximum rows of a block, including that of the last token.
        embedding_scale: factor applied to the token embeddings.
        logit_scale, logit_soft_cap: applied to the logits, in this order.
        drafts_at_anchor: whether row j drafts the token after its own position (then the first row drafts too) or the token at its own
            position; None = not stated in the config.
        markov: DSpark's Markov head, whose bias on the logits depends on drafted tokens; None = none.
        has_confidence: it predicts the probability that a draft token is accepted.
        has_markov_confidence: the confidence head also reads the previous token's Markov embedding.
        has_own_lm_head, has_own_embedding: the file's matrices are used, not the target's. Many files hold copies of the target's.
    """

    kind: HeadKind
    layers: ModelConfig
    feature_size: int
    boundaries: tuple[int, ...]
    block_size: int
    mask_token_id: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    drafts_at_anchor: bool | None = None
    markov: MarkovKind | None = None
    has_confidence: bool = False
    has_markov_confidence: bool = False
    has_own_lm_head: bool = False
    has_own_embedding: bool = False


@dataclass(frozen=True, slots=True)
class BlockCheckpoint:
    """An opened block drafter.

    Attributes:
        weights: of the networks, by the names used in `network.py`; without lm_head if that is the target's.
        small_tensors: float32 weights of the Markov and confidence heads, for NumPy: `markov_w1` [V, r], `gate`, `joint`, `confidence`.
        mask_embedding: [E] embedding of the mask token; None = the target's row.
        target_ids: [Vd] the target's id of each draft id, ascending; None = the same.
    """

    config: BlockConfig
    weights: Weights
    small_tensors: Mapping[str, NDArray[np.float32]]
    mask_embedding: NDArray[np.float32] | None
    target_ids: NDArray[np.int64] | None


def read_block_config(files: HeadFiles, target: ModelConfig) -> BlockConfig:
    """Read the config of the drafter in `files`.

    Raises:
        CheckpointError: a value of the config is missing or impossible.
        IncompatibleDrafterError: it computes something that is not supported, or was made for another target.
    """
    _check_supported(files)
    files = _with_canonical_names(files)
    fields = _merged_config_fields(files)
    fc = files.shape("fc.weight")
    if fc is None or fc[1] % target.hidden_size:
        width = "no fc.weight" if fc is None else f"fc.weight of {fc[1]} columns"
        raise IncompatibleDrafterError(
            f"the {files.kind.value} drafter {files.path} holds {width}, the target's hidden states have {target.hidden_size} values: "
            "it was made for another model"
        )
    layers = _decoder_config(files, fields, fc[0])
    boundaries = _read_layer_boundaries(files, fields, fc[1] // target.hidden_size, target)
    check_pairing(files, target, hidden_size=fc[1] // len(boundaries))
    if layers.hidden_size != target.hidden_size and "embed_tokens.weight" not in files.tensors:
        raise IncompatibleDrafterError(
            f"{files.path} has no embed_tokens.weight, and the target's rows of {target.hidden_size} values do not fit its hidden size "
            f"{layers.hidden_size}: it was made for another model"
        )
    own_rows = files.shape("lm_head.weight")
    has_own_lm_head = own_rows is not None and ("d2t" in files.tensors or own_rows != (target.vocab_size, target.hidden_size))
    mask_id = fields.token_ids("mask_token_id")
    if len(mask_id) != 1 or mask_id[0] >= target.vocab_size:
        raise IncompatibleDrafterError(
            f"{fields.path}: mask_token_id = {list(mask_id)}, expected one id below the target's {target.vocab_size}"
        )
    return BlockConfig(
        kind=files.kind,
        layers=replace(layers, vocab_size=own_rows[0] if has_own_lm_head and own_rows else target.vocab_size),
        feature_size=target.hidden_size,
        boundaries=boundaries,
        block_size=fields.size("block_size", 16, least=2, most=256),
        mask_token_id=mask_id[0],
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        logit_scale=fields.number("output_multiplier", 1.0),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
        drafts_at_anchor=_read_drafts_at_anchor(files, fields),
        markov=_markov_kind(files, fields),
        has_confidence="confidence_head.proj.weight" in files.tensors,
        has_markov_confidence=fields.flag("confidence_head_with_markov", default=False),
        has_own_lm_head=has_own_lm_head,
        has_own_embedding=layers.hidden_size != target.hidden_size,
    )


def _markov_kind(files: HeadFiles, fields: JsonFields) -> MarkovKind | None:
    if "markov_head.markov_w1.weight" not in files.tensors:
        return None
    name = str(fields.values.get("markov_head_type", "vanilla"))
    known = [kind.value for kind in MarkovKind]
    if name not in known:
        raise IncompatibleDrafterError(f"{files.path}: markov_head_type {name!r} is not supported; {', '.join(known)} are")
    return MarkovKind(name)


def open_block(files: HeadFiles, config: BlockConfig, target: ModelConfig) -> BlockCheckpoint:
    """Open the weights and the draft vocabulary.

    Raises:
        CheckpointError: tensors are missing, of another shape, or unknown; all of them are named.
    """
    files = _with_canonical_names(files)
    required, optional, dropped = _tensor_shapes(files, config)
    files.check(required, optional)
    used = [name for name in (*required, *optional) if name in files.tensors]
    files.check_all_used([*used, *dropped])
    small_tensors = {
        name for name in used if name.startswith(("markov_head.", "confidence_head.")) and not name.endswith("markov_w2.weight")
    }
    tensors: dict[str, AnyTensor] = {_internal_tensor_name(name): files.weight(name) for name in used if name not in small_tensors}
    if not _is_neox_rope(_merged_config_fields(files)):
        _interleaved_rope_to_neox(tensors, config.layers)
    mask = files.path / "mask_embedding.pt"
    stored = read_tensors(mask, "head") if files.path.is_dir() and mask.is_file() else {}
    row = np.asarray(stored["embedding"].open(), np.float32).reshape(-1) if "embedding" in stored else None
    if row is not None and len(row) != config.layers.hidden_size:
        raise CheckpointError(f"{mask} holds a row of {len(row)} values, expected {config.layers.hidden_size}; download it again")
    return BlockCheckpoint(
        config,
        Weights(tensors),
        {_small_tensor_name(name): as_float32(files.weight(name)) for name in small_tensors},
        row,
        target_ids_of(files, config.layers.vocab_size, target),
    )


def _check_supported(files: HeadFiles) -> None:
    """Raise an error for drafters with a network part that is not supported."""
    config = files.config
    nested = config.get("dflash_config")
    keys = [*config, *(nested if isinstance(nested, Mapping) else ())]
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    unsupported = next((key for key in keys if key.startswith(_UNSUPPORTED_KEYS)), None)
    if any(name in architecture for name in _UNSUPPORTED_ARCHITECTURES):
        raise IncompatibleDrafterError(f"{files.path} is a drafter of the kind {architecture}, which is not supported: use another drafter")
    if unsupported is not None:
        raise IncompatibleDrafterError(
            f"{files.path} is a {files.kind.value} drafter with {unsupported!r}, which is not supported: use another drafter"
        )


def _with_canonical_names(files: HeadFiles) -> HeadFiles:
    """Return the files with tensor names of other exporters replaced by those of z-lab's files."""
    renamed: dict[str, FileTensor] = {}
    for name, tensor in files.tensors.items():
        alias = next((alias for alias in _TENSOR_NAME_ALIASES if name.startswith(alias)), None)
        renamed[name if alias is None else _TENSOR_NAME_ALIASES[alias] + name.removeprefix(alias)] = tensor
    return replace(files, tensors=renamed)


def _merged_config_fields(files: HeadFiles) -> JsonFields:
    """Return the config fields, with the nested `transformer_layer_config` and `dflash_config` merged in."""
    config: Mapping[str, Any] = files.config
    values: dict[str, Any] = dict(_MUSE_GLIMMER_DEFAULTS) if config.get("model_type") == "muse_glimmer_assistant" else {}
    for part in (config.get("transformer_layer_config"), config, config.get("dflash_config")):
        values |= part if isinstance(part, Mapping) else {}
    if config.get("model_type") == "muse_glimmer_assistant":
        values["layer_types"] = [_SLIDING] * max(1, files.count("layers.{}."))
        values["sliding_window"] += 1  # transformers counts the distance to the first visible position, not the positions
    values.setdefault("max_position_embeddings", 2**20)
    return JsonFields(values, files.path / "config.json" if files.path.is_dir() else files.path)


def _decoder_config(files: HeadFiles, fields: JsonFields, hidden_size: int) -> ModelConfig:
    num_heads = fields.size("num_attention_heads")
    query, key, gate = (files.shape(f"layers.0.{name}.weight") for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))
    head_size = fields.size("head_dim", hidden_size // num_heads, null=hidden_size // num_heads)
    num_kv_heads = fields.size("num_key_value_heads", num_heads, null=num_heads)
    activation = str(fields.values.get("hidden_act", "silu"))
    if query is None or key is None or gate is None:
        raise CheckpointError(f"{files.path} has no whole layer 0: the file is damaged, download it again")
    if query[0] != num_heads * head_size:  # refuse wrong head counts before anything is allocated by them
        raise CheckpointError(f"{fields.path}: {num_heads} heads of {head_size} values, expected {query[0]} in all as q_proj has")
    if activation not in ACTIVATIONS or head_size % 2 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: hidden_act {activation!r} with {num_heads} heads of {head_size} values and {num_kv_heads} key heads is no "
            f"network we run: the activation is one of {', '.join(ACTIVATIONS)}, heads are of even size and a multiple of the key heads"
        )
    tensors = files.tensors
    family = replace(FAMILIES["llama"], has_partial_rope=True)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope=read_rope(fields, family, head_size=head_size).for_context(None),
        scale=float(head_size**-0.5),
        qk_norm=QKNorm.HEAD if "layers.0.self_attn.q_norm.weight" in tensors else QKNorm.NONE,
        has_sinks=any(f"layers.0.{name}" in tensors for name in _SINK_TENSOR_NAMES),
        value_scale=fields.number("attention_value_scale", 1.0),
    )
    mlp = DenseMLP(intermediate_size=gate[0], activation=ACTIVATIONS[activation])
    kinds = _attention_kinds(fields, max(1, files.count("layers.{}.")), speculators=files.is_speculators)
    config = ModelConfig(
        family="llama",
        vocab_size=1,
        hidden_size=hidden_size,
        layers=tuple(LayerConfig(mixer=replace(attention, window=window, is_causal=causal), mlp=mlp) for window, causal in kinds),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.size("max_position_embeddings"),
        weight_type=WeightType.F32,
    )
    check_frequencies(config, fields.path)
    return config


def _attention_kinds(fields: JsonFields, num_layers: int, *, speculators: bool) -> list[tuple[int | None, bool]]:
    """Return window and causality of each layer. By default, layers with a window are causal and others see the whole block."""
    values = fields.values
    named = values.get("layer_types")
    if fields.flag("use_swa", default=False):
        windows: list[int | None] = [fields.size("swa_window_size")] * num_layers
    elif named is None:
        windows = [None] * num_layers
    elif isinstance(named, list) and len(named) >= num_layers and all(kind in (_FULL, _SLIDING) for kind in named[:num_layers]):
        window = fields.size("sliding_window") if _SLIDING in named[:num_layers] else None
        windows = [window if kind == _SLIDING else None for kind in named[:num_layers]]
    else:
        raise CheckpointError(
            f"{fields.path}: layer_types = {str(named)[:80]}, expected {_SLIDING} or {_FULL} for each of {num_layers} layers"
        )
    given = values.get("is_causal", values.get("causal"))
    if given is None and speculators and fields.flag("sliding_window_non_causal", default=True):
        given = False
    block_size = fields.size("block_size", 16)
    causal = [window is not None if given is None else bool(given) for window in windows]
    narrow = [window for window, is_causal in zip(windows, causal, strict=True) if window and not is_causal and window < block_size]
    if narrow:
        raise IncompatibleDrafterError(f"{fields.path}: a window of {narrow[0]} positions is shorter than a block of {block_size} rows")
    return list(zip(windows, causal, strict=True))


def _read_layer_boundaries(files: HeadFiles, fields: JsonFields, count: int, target: ModelConfig) -> tuple[int, ...]:
    """Return the layer boundaries; b = the input of layer b. Most configs list layers, whose outputs are read; speculators' list b."""
    num_layers = target.num_layers
    named = fields.values.get("aux_hidden_state_layer_ids", fields.values.get("target_layer_ids"))
    if named is not None and not (isinstance(named, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in named)):
        raise CheckpointError(f"{fields.path}: target_layer_ids = {str(named)[:80]}, expected a list of layers")
    if "aux_hidden_state_layer_ids" in fields.values or (named is None and files.is_speculators):
        found = [2, num_layers // 2, num_layers - 3] if named is None else list(named)
    elif named is not None:
        found = [layer + 1 for layer in named]
    elif count == 1:
        found = [num_layers // 2 + 1]
    else:
        found = [round(1 + index * (num_layers - 4) / (count - 1)) + 1 for index in range(count)]
    if len(found) != count or len(set(found)) != count or not all(0 <= boundary <= num_layers for boundary in found):
        raise IncompatibleDrafterError(
            f"{files.path} reads {count} of the target's layer boundaries, and its config names {found} of {num_layers} layers: "
            "it was made for another model"
        )
    return tuple(found)


def _read_drafts_at_anchor(files: HeadFiles, fields: JsonFields) -> bool | None:
    given = fields.values.get("sample_from_anchor", fields.values.get("shift_label"))
    if given is not None:
        return fields.flag("sample_from_anchor" if "sample_from_anchor" in fields.values else "shift_label", default=False)
    return False if files.kind is HeadKind.DFLASH else None


def default_drafts_at_anchor(files: HeadFiles) -> bool:
    """Return the likely value of a missing `sample_from_anchor`: false in speculators' files, true in other DSpark files."""
    is_speculators = files.is_speculators or bool({"transformer_layer_config", "aux_hidden_state_layer_ids"} & files.config.keys())
    return files.kind is HeadKind.DSPARK and not is_speculators


def _is_neox_rope(fields: JsonFields) -> bool:
    """Return whether rotary embeddings pair the two halves of a head; otherwise neighbouring values."""
    named = fields.values.get("architectures")
    default = not (isinstance(named, list) and named and str(named[0]).startswith("Lfm2"))
    return fields.flag("rope_is_neox_style", default=fields.flag("is_neox_style", default=default))


def _interleaved_rope_to_neox(tensors: dict[str, AnyTensor], layers: ModelConfig) -> None:
    """Reorder query and key rows so that neighbouring pairs become pairs of halves."""
    for layer, mixer in layers.attention_layers.items():
        size, rotated = mixer.head_size, mixer.rope.rotary_size(mixer.head_size)
        own = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, size)])
        for part, heads in (("q", mixer.num_heads), ("k", mixer.num_kv_heads)):
            rows = (np.arange(heads)[:, None] * size + own).reshape(-1)
            for name, order in ((f"{part}_proj.weight", rows), (f"{part}_proj.bias", rows), (f"{part}_norm.weight", own)):
                stored = tensors.get(f"layers.{layer}.{name}")
                if isinstance(stored, Tensor):
                    tensors[f"layers.{layer}.{name}"] = Tensor(stored.array[order], stored.weight_type, stored.shape)


def _tensor_shapes(files: HeadFiles, config: BlockConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], Sequence[str]]:
    """Return shapes of the required and of the optional tensors, and names of ignored ones, such as copies of the target's tensors."""
    layers, hidden = config.layers, config.layers.hidden_size
    required: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size * len(config.boundaries)), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    optional: dict[str, tuple[int, ...]] = {"fc.bias": (hidden,)}
    for layer, mixer in layers.attention_layers.items():
        prefix, mlp = f"layers.{layer}.", layers.layers[layer].mlp
        assert isinstance(mlp, DenseMLP)
        inner = mlp.intermediate_size
        matrices = {
            "self_attn.q_proj": (mixer.query_size, hidden), "self_attn.k_proj": (mixer.kv_size, hidden),
            "self_attn.v_proj": (mixer.kv_size, hidden), "self_attn.o_proj": (hidden, mixer.query_size),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        for name, shape in matrices.items():
            required[f"{prefix}{name}.weight"] = shape
            optional[f"{prefix}{name}.bias"] = shape[:1]
        required |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if mixer.qk_norm is QKNorm.HEAD:
            required |= {f"{prefix}self_attn.{name}.weight": (mixer.head_size,) for name in ("q_norm", "k_norm")}
        if mixer.has_sinks:
            required |= {prefix + name: (mixer.num_heads,) for name in _SINK_TENSOR_NAMES if prefix + name in files.tensors}
    if config.has_own_lm_head:
        required["lm_head.weight"] = (layers.vocab_size, hidden)
    if config.has_own_embedding:
        required["embed_tokens.weight"] = ((files.shape("embed_tokens.weight") or (0, 0))[0], hidden)
    rank = (files.shape("markov_head.markov_w1.weight") or (0, 0))[1]
    if config.markov is not None:
        embedded = (files.shape("markov_head.markov_w1.weight") or (0, 0))[0]
        required |= {
            "markov_head.markov_w1.weight": (embedded, rank),
            "markov_head.markov_w2.weight": (layers.vocab_size, rank),
        }
    if config.markov is MarkovKind.GATED:
        required |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.markov is MarkovKind.RNN:
        required |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if config.has_confidence:
        width = hidden + (rank if config.has_markov_confidence else 0)
        required |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    copies = {"embed_tokens.weight": config.has_own_embedding, "lm_head.weight": config.has_own_lm_head}
    dropped = ["d2t", "t2d", *(name for name, is_own in copies.items() if not is_own)]
    return required, optional, dropped


def _internal_tensor_name(name: str) -> str:
    """Return the name that `network.py` uses for a tensor of the file."""
    if any(name.endswith(sinks) for sinks in _SINK_TENSOR_NAMES):
        return f"layers.{name.split('.')[1]}.attention.sinks"
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"layers.{layer}.{_LAYER_TENSOR_NAMES[part]}.{kind}"
    return f"{_TENSOR_NAMES.get(stem, stem)}.{kind}"


def _small_tensor_name(name: str) -> str:
    parts = {
        "markov_head.markov_w1": "markov_w1", "markov_head.gate_proj": "gate", "markov_head.joint_proj": "joint",
        "confidence_head.proj": "confidence",
    }  # fmt: skip
    stem, kind = name.rsplit(".", 1)
    return parts[stem] if kind == "weight" else f"{parts[stem]}_bias"
