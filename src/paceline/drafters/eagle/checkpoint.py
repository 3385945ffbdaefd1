"""EAGLE heads as they are stored: sizes, switches, the draft vocabulary, and the weights under our names.

What the files do not say is decided by the rules of the reference implementations: no `rope_theta` means 10000, never the target's;
biases are those whose tensors are there; a recurrence through the final norm is honoured in speculators files only.

Source: EAGLE (Li et al. 2024, arXiv:2401.15077, section 4.1), EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3) and their code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.eagle.boundaries import boundaries_of, named_boundaries
from paceline.drafters.head_files import HeadFiles, HeadKind, HeadTensor, check_pairing
from paceline.drafters.pairs.config import PairConfig
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import Activation, ModelConfig, RopeConfig, WeightType
from paceline.models.families import FAMILIES
from paceline.models.json_fields import JsonFields
from paceline.models.rope_config import read_rope
from paceline.models.weights import AnyTensor, Weights

DEFAULT_POSITIONS = 2048  # what a config without a length means
_ALIASES = {"midlayer.": "layers.0.", "fusion_fc.": "fc.", "pre_lm_head_layernorm.": "hidden_states_layernorm."}
_PARTS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "hidden_norm": "hidden_norm",
    **{f"self_attn.{name}": name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"mlp.{name}": name for name in ("gate_proj", "up_proj", "down_proj")},
}
_OURS = {
    "embed_tokens": "embedding", "norm": "final_norm", "lm_head": "lm_head", "fc": "fc", "input_norm": "input_norm",
    "embedding_layernorm": "embedding_norm", "hidden_states_layernorm": "feature_norm",
}  # fmt: skip
_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(PairConfig):
    """What a head is; its kind is EAGLE (1 and 2 are the same network) or EAGLE3.

    Attributes:
        has_fc: EAGLE-3: its features are mixed by `fc`; otherwise they are used as they are.
        norms_halves: EAGLE: embedding and feature are normed before `fc`.
        norms_features, norms_chunks: EAGLE-3: all boundaries together, or each of them, are normed before `fc`.
        norms_embedding: EAGLE-3: the embedding is normed in front of the attention.
        norm_before_residual: EAGLE-3: the residual stream begins with the normed feature.
        has_final_norm: there is a norm in front of the head over the vocabulary.
        uses_fc_bias: a bias of `fc` that the file holds is added.
    """

    has_fc: bool = True
    norms_halves: bool = False
    norms_features: bool = False
    norms_chunks: bool = False
    norms_embedding: bool = True
    norm_before_residual: bool = False
    has_final_norm: bool = False
    uses_fc_bias: bool = True


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """An opened head.

    Attributes:
        weights: under the names of `network.py`; without the embedding and `lm_head` that are the target's.
        target_ids: [Vd] the target's id of each draft id; None = the same.
        notices: one-line remarks for the user.
    """

    config: EagleConfig
    weights: Weights
    target_ids: NDArray[np.int64] | None
    notices: tuple[str, ...] = ()


def read_eagle_config(files: HeadFiles, target: ModelConfig, *, boundaries: Sequence[int] | None = None) -> EagleConfig:
    """What the head is, from its config and the shapes of its tensors; nothing large is read.

    Args:
        boundaries: those a user names, for files that do not say which an EAGLE-3 head reads, or say it wrongly.

    Raises:
        CheckpointError: the config lacks a size or holds an absurd value.
        IncompatibleDrafterError: the head is of a kind we do not run, or made for another target.
    """
    if files.kind not in (HeadKind.EAGLE, HeadKind.EAGLE3):
        raise IncompatibleDrafterError(f"{files.path} is a {files.kind.value} head, not an EAGLE one; name its method's drafter")
    files = plain_files(files)
    fields = config_fields(files)
    layers = _layers(files, fields)
    own_lm_head = files.kind is HeadKind.EAGLE3 and "lm_head.weight" in files.tensors
    own_embedding = "embed_tokens.weight" in files.tensors
    if files.kind is HeadKind.EAGLE:
        config = EagleConfig(
            kind=files.kind,
            layers=layers,
            feature_size=layers.hidden_size,
            norms_halves="hidden_states_layernorm.weight" in files.tensors,
            own_embedding=own_embedding,
        )
    else:
        config = _eagle3(files, fields, layers, target, boundaries, own_embedding=own_embedding, own_lm_head=own_lm_head)
    by_id = next((files.tensors[name] for name in ("t2d", "embed_tokens.weight") if name in files.tensors), None)
    vocab_rows = None if by_id is None else by_id.shape[0]
    check_pairing(files, target, hidden_size=config.feature_size, vocab_rows=vocab_rows)
    if not config.has_fc and layers.hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"{files.path} takes the target's features of {target.hidden_size} values as they are, its own size is "
            f"{layers.hidden_size}: it was made for another model"
        )
    if not own_embedding and layers.hidden_size != target.hidden_size:
        raise IncompatibleDrafterError(
            f"{files.path} has no embed_tokens.weight, and the target's rows of {target.hidden_size} values do not fit its "
            f"hidden size {layers.hidden_size}: the file is not complete"
        )
    return config


def open_eagle(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> EagleCheckpoint:
    """The weights and the draft vocabulary.

    Raises:
        CheckpointError: tensors are missing or of another shape; all of them are named.
        IncompatibleDrafterError: its vocabulary is not the target's.
    """
    files = plain_files(files)
    required, optional = _shapes(files, config, target)
    files.check(required, optional)
    used = [name for name in (*required, *optional) if name in files.tensors]
    tensors: dict[str, AnyTensor] = {our_name(name): files.weight(name) for name in used}
    ids = _target_ids(files, config, target)
    notices = files.unused([*used, "d2t", "t2d"], ignored=lambda name: name.startswith(("verifier_", "lm_head.")))
    return EagleCheckpoint(config, Weights(tensors), ids, notices)


def plain_files(files: HeadFiles) -> HeadFiles:
    """The same with one name for what has several."""
    renamed: dict[str, HeadTensor] = {}
    for name, tensor in files.tensors.items():
        alias = next((alias for alias in _ALIASES if name.startswith(alias)), None)
        renamed.setdefault(name if alias is None else _ALIASES[alias] + name.removeprefix(alias), tensor)
    return replace(files, tensors=renamed)


def our_name(name: str) -> str:
    """How `network.py` calls a tensor of the file."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"layers.{layer}.{_PARTS[part]}.{kind}"
    return f"{_OURS.get(stem, stem)}.{kind}"


def config_fields(files: HeadFiles) -> JsonFields:
    """The values of config.json, those of a speculators file's layer among them."""
    path = files.path / "config.json" if files.path.is_dir() else files.path.with_name("config.json")
    if not files.config:
        raise CheckpointError(f"{path} is missing: an EAGLE head's sizes stand there; download it with the weights")
    nested = files.config.get("transformer_layer_config")
    values = {**(nested if isinstance(nested, Mapping) else {}), **files.config}
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "mrope":
        values["rope_scaling"] = None  # of text alone it is the plain rotation
    length = values.get("max_sequence_length", DEFAULT_POSITIONS)
    return JsonFields({"max_position_embeddings": length, **values}, path)


def _layers(files: HeadFiles, fields: JsonFields) -> ModelConfig:
    """Sizes of the head's own layers; where config and tensors differ the tensors are right."""
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    shapes = {name.removeprefix("layers.0."): tensor.shape for name, tensor in files.tensors.items() if name.startswith("layers.0.")}
    head_size = fields.size("head_dim", hidden_size // num_heads, null=hidden_size // num_heads)
    query, key = shapes.get("self_attn.q_proj.weight"), shapes.get("self_attn.k_proj.weight")
    if fields.values.get("head_dim") is None and query is not None and query[0] % num_heads == 0:
        head_size = query[0] // num_heads
    num_kv_heads = fields.size("num_key_value_heads", num_heads, null=num_heads)
    if key is not None and key[0] % head_size == 0 and num_heads % max(1, key[0] // head_size) == 0:
        num_kv_heads = key[0] // head_size
    gate = shapes.get("mlp.gate_proj.weight")
    numbers = [int(name.split(".")[1]) for name in files.tensors if name.startswith("layers.")]
    vocab_size = fields.size("vocab_size")
    activation = str(fields.values.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS or head_size % 2 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.path}: hidden_act {activation!r} with {num_heads} heads of {head_size} values and {num_kv_heads} key heads is no "
            f"network we run: the activation is one of {', '.join(_ACTIVATIONS)}, heads are of even size and a multiple of the key heads"
        )
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=gate[0] if gate is not None else fields.size("intermediate_size"),
        num_layers=max(numbers, default=0) + 1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_positions=fields.size("max_position_embeddings"),
        rope=_rope(fields, head_size),
        weight_type=WeightType.F32,
        qk_norm="self_attn.q_norm.weight" in shapes,
        activation=_ACTIVATIONS[activation],
    )


def _rope(fields: JsonFields, head_size: int) -> RopeConfig:
    return read_rope(fields, FAMILIES["llama"], head_size=head_size).for_context(None)


def _eagle3(
    files: HeadFiles,
    fields: JsonFields,
    layers: ModelConfig,
    target: ModelConfig,
    named: Sequence[int] | None,
    *,
    own_embedding: bool,
    own_lm_head: bool,
) -> EagleConfig:
    nested = files.config.get("eagle_config")
    switches = JsonFields(nested if isinstance(nested, Mapping) else {}, fields.path)
    is_speculators = "speculators_model_type" in files.config
    if switches.flag("use_mtp_layernorm", default=False) or switches.size("parallel_draft_step", 1) > 1:
        raise IncompatibleDrafterError(f"{fields.path}: heads with use_mtp_layernorm or parallel_draft_step > 1 are not supported")
    has_fc = switches.flag("use_aux_hidden_state", default=True) or "fc.weight" in files.tensors
    feature_size = fields.size("target_hidden_size", target.hidden_size, null=target.hidden_size)
    fc = files.tensors.get("fc.weight")
    if has_fc and fc is not None and len(fc.shape) == 2 and fc.shape[1] % feature_size:
        raise IncompatibleDrafterError(
            f"{files.path}: fc.weight takes {fc.shape[1]} values, which are no whole number of the target's features of {feature_size}: "
            "the head was made for another model"
        )
    count = fc.shape[1] // feature_size if fc is not None and len(fc.shape) == 2 else fields.size("num_aux_hidden_states", 3)
    boundaries: tuple[int, ...] = ()
    if has_fc and named is not None:
        boundaries = named_boundaries(named, count, target.num_layers)
    elif has_fc:
        boundaries = boundaries_of(files, switches, fields, count, target.num_layers)
    return EagleConfig(
        kind=files.kind,
        layers=replace(layers, vocab_size=_draft_vocab_size(files, fields)),
        feature_size=feature_size,
        boundaries=boundaries,
        has_fc=has_fc,
        norms_features="input_norm.weight" in files.tensors,
        norms_chunks="fc_norm.0.weight" in files.tensors,
        norms_embedding=switches.flag("use_input_layernorm_in_first_layer", default=True),
        norm_before_residual=fields.flag("norm_before_residual", default=False),
        has_final_norm=switches.flag("use_last_layernorm", default=True),
        normed_recurrence=is_speculators and fields.flag("norm_output", default=False),
        own_embedding=own_embedding,
        own_lm_head=own_lm_head,
    )


def _draft_vocab_size(files: HeadFiles, fields: JsonFields) -> int:
    """Vd: rows of the head over the vocabulary, whatever the config says."""
    lm_head = files.tensors.get("lm_head.weight")
    if lm_head is not None:
        return lm_head.shape[0]
    vocab_size = fields.size("vocab_size")
    return fields.size("draft_vocab_size", vocab_size, null=vocab_size)


def _shapes(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tensors of the file that the network needs, and those it uses where they are there."""
    layers, is_eagle3 = config.layers, config.kind is HeadKind.EAGLE3
    hidden, width = layers.hidden_size, config.num_features
    required: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    if not is_eagle3:
        required["fc.weight"] = (hidden, 2 * hidden)
        optional["fc.bias"] = (hidden,)
        if config.norms_halves:
            required |= {"embedding_layernorm.weight": (hidden,), "hidden_states_layernorm.weight": (hidden,)}
    else:
        if config.has_fc:
            required["fc.weight"] = (hidden, width)
            optional["fc.bias"] = (hidden,)
        required["layers.0.hidden_norm.weight"] = (hidden,)
        if config.norms_features:
            required["input_norm.weight"] = (width,)
        if config.norms_chunks:
            required |= {f"fc_norm.{chunk}.weight": (config.feature_size,) for chunk in range(len(config.boundaries))}
        if config.has_final_norm:
            required["norm.weight"] = (hidden,)
        if config.own_lm_head or layers.vocab_size != target.vocab_size or hidden != target.hidden_size:
            required["lm_head.weight"] = (layers.vocab_size, hidden)
    for layer in range(layers.num_layers):
        has_norm = layer > 0 or (is_eagle3 and config.norms_embedding)
        _add_layer(layers, layer, required, optional, columns=2 * hidden if is_eagle3 and layer == 0 else hidden, has_norm=has_norm)
    if config.own_embedding:
        required["embed_tokens.weight"] = (files.tensors["embed_tokens.weight"].shape[0], hidden)
    return required, optional


def _add_layer(
    layers: ModelConfig,
    layer: int,
    required: dict[str, tuple[int, ...]],
    optional: dict[str, tuple[int, ...]],
    *,
    columns: int,
    has_norm: bool,
) -> None:
    hidden, inner, head_size = layers.hidden_size, layers.intermediate_size, layers.head_size
    query, kv = layers.num_heads * head_size, layers.num_kv_heads * head_size
    matrices = {
        "self_attn.q_proj": (query, columns),
        "self_attn.k_proj": (kv, columns),
        "self_attn.v_proj": (kv, columns),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for name, shape in matrices.items():
        required[f"layers.{layer}.{name}.weight"] = shape
        optional[f"layers.{layer}.{name}.bias"] = shape[:1]
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm") if has_norm else ("post_attention_layernorm",)
    required |= {f"layers.{layer}.{name}.weight": (hidden,) for name in norms}
    if layers.qk_norm:
        required |= {f"layers.{layer}.self_attn.{name}.weight": (head_size,) for name in ("q_norm", "k_norm")}


def _target_ids(files: HeadFiles, config: EagleConfig, target: ModelConfig) -> NDArray[np.int64] | None:
    """`d2t` holds what to add to a draft id; its ids ascend, and `t2d` marks the same ones.

    Raises:
        IncompatibleDrafterError: an id is not the target's.
        CheckpointError: the tables do not fit one another.
    """
    if config.kind is HeadKind.EAGLE or "d2t" not in files.tensors:
        return None
    size = config.layers.vocab_size
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
