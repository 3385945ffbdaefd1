"""PARD-2 draft models: language models that also read the target's hidden states, and draft all tokens in one pass.

The input at position t is embedding(token t) + scale * target_proj(feature t - 1). The feature is the target's hidden states of several
layers at that position, concatenated; before the first token it is zeros. Mask tokens take the same feature as the last committed token.

Source: PARD-2 (arXiv:2605.08632) and its code, AMD-AGI/PARD `pard/pard2_infer.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.drafters.head_files import HeadFiles, check_target_sizes
from paceline.drafters.recurrent_heads.drafter import ParallelDrafter
from paceline.drafters.recurrent_heads.head import EMBEDDING, FEATURE, MaskedFeaturePair, RecurrentHead, RecurrentHeadConfig
from paceline.drafters.target import LoadedTarget
from paceline.errors import CheckpointError, IncompatibleDrafterError, shortened
from paceline.models.checkpoint import open_weights, read_model_config, weight_files
from paceline.models.config import ModelConfig
from paceline.models.json_fields import JsonFields
from paceline.models.storage.tensor_file import read_tensors
from paceline.models.weights import Weights
from paceline.runtimes.decoder import LOGITS, NetworkDefinition, Ops, Value, decoder_layer
from paceline.runtimes.load import HeadPlacement, default_kv_cache_dtype, load_head
from paceline.small_files import is_file
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import VocabularyComparison, compare_vocabularies

PROJECTION_FILE = "warp_model.bin"
"""File next to the language model with `target_proj`, the projection of features."""
_SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3")
_DEFAULT_FEATURE_SCALE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Pard2Config(RecurrentHeadConfig):
    hidden_state_order: tuple[int, ...]  # indices of a feature's hidden states, in the order in which the projection reads them
    scale: float  # factor of the projected feature
    has_projection_bias: bool  # the projection has a bias
    mask_token_id: int  # input token of the positions whose token is not known yet


def read_pard2_config(files: HeadFiles, target: ModelConfig) -> Pard2Config:
    """Read the configuration of a PARD-2 draft model, and check that it fits the target.

    Raises:
        CheckpointError: the config lacks a size or has an invalid value.
        IncompatibleDrafterError: the model was made for another target, or is of a family that is not supported.
    """
    fields, layers = JsonFields(files.config, files.config_path), read_model_config(files.config_path.parent)
    if layers.family not in _SUPPORTED_FAMILIES:
        raise IncompatibleDrafterError(
            f"{fields.path}: model_type is {layers.family!r}; PARD-2 draft models of {', '.join(_SUPPORTED_FAMILIES)} can be used"
        )
    check_target_sizes(files, target, hidden_size=target.hidden_size, num_vocab_rows=layers.vocab_size)
    listed_boundaries = _read_layer_boundaries(fields, target.num_layers)
    boundaries = tuple(sorted({boundary for boundary in listed_boundaries if boundary < target.num_layers}))
    boundaries_of_feature = (*boundaries, target.num_layers)
    dim_field = _first_present_field(fields, "pard2_target_dim", "pard_target_dim")
    target_dim, dim = fields.integer(dim_field, len(listed_boundaries) * target.hidden_size), len(listed_boundaries) * target.hidden_size
    if target_dim != dim:
        raise IncompatibleDrafterError(
            f"{fields.path}: {dim_field} is {target_dim}; {len(listed_boundaries)} hidden states of the target have {dim} values: "
            "the draft model was made for another target"
        )
    return Pard2Config(
        kind=files.kind,
        layers=layers,
        target_hidden_size=target.hidden_size,
        layer_boundaries=boundaries,
        feature_ends_with_final_state=target.num_layers in listed_boundaries,
        first_slot=0,
        has_own_lm_head=True,
        hidden_state_order=tuple(boundaries_of_feature.index(boundary) for boundary in listed_boundaries),
        scale=fields.number(_first_present_field(fields, "pard2_scale", "pard_scale", "feat_scale"), _DEFAULT_FEATURE_SCALE),
        has_projection_bias=fields.flag(_first_present_field(fields, "pard2_proj_bias", "proj_bias"), default=False),
        mask_token_id=fields.integer("pard_token", minimum=0, maximum=layers.vocab_size - 1),
    )


def _first_present_field(fields: JsonFields, *names: str) -> str:
    """Return the first of the alternative field names that the config contains; `names[0]` if it contains none of them."""
    return next((name for name in names if name in fields.values), names[0])


def _read_layer_boundaries(fields: JsonFields, num_layers: int) -> list[int]:
    """Return the layer boundaries that the projection reads, in the order in which it reads them. Negative numbers count from the end.

    The last boundary, `num_layers`, means the final hidden state, after the norm, as in the `hidden_states` of transformers.
    """
    listed = fields.values.get("pard2_target_layers")
    if not isinstance(listed, list) or not listed or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in listed):
        raise CheckpointError(
            f"{fields.path}: pard2_target_layers = {shortened(listed)}, expected a list of layers of the target; download it again"
        )
    if not all(-num_layers - 1 <= layer <= num_layers for layer in listed):
        raise IncompatibleDrafterError(
            f"{fields.path}: pard2_target_layers = {shortened(listed)}, and the target has {num_layers} layers: "
            "the draft model was made for another target"
        )
    return [layer + num_layers + 1 if layer < 0 else layer for layer in listed]


def open_pard2_weights(files: HeadFiles, config: Pard2Config) -> Weights:
    """Open the weights of the language model and of the projection.

    Raises:
        CheckpointError: a file is missing or damaged, or tensors are missing, unknown, or of the wrong shape or type.
        IncompatibleDrafterError: matrices of the language model are quantised.
    """
    directory = files.config_path.parent
    weights = open_weights(directory, config.layers)
    if weights.packed_matrices:
        raise IncompatibleDrafterError(
            f"{directory}: its matrices are packed as {weights.quantized_format}, which is not supported for PARD-2 draft models: "
            "use the unquantised model, with --draft-quantization if it is too large"
        )
    path = directory / PROJECTION_FILE
    if not is_file(path):
        raise CheckpointError(f"{directory} has no {PROJECTION_FILE}, a part of every PARD-2 draft model; download it again")
    projection = HeadFiles(path, files.config, read_tensors(path, "head"), files.kind, (path,))
    hidden_size = config.layers.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"target_proj.weight": (hidden_size, len(config.hidden_state_order) * config.target_hidden_size)}
    if config.has_projection_bias:
        shapes["target_proj.bias"] = (hidden_size,)
    projection.check_shapes(shapes)
    projection.check_all_used(shapes)
    return Weights({**weights, **{name: projection.weight(name) for name in shapes}})


def check_tokenizer(path: Path, comparison: VocabularyComparison) -> None:
    """Check that a draft model has the target's token ids: its input combines tokens with the target's hidden states of the same positions.

    Raises:
        IncompatibleDrafterError: the tokenizers differ.
    """
    if not comparison.is_compatible:
        raise IncompatibleDrafterError(
            f"the PARD-2 draft model {path} has another tokenizer than the target: {comparison.describe_match()}; use one made for it"
        )


def pard2_network(config: Pard2Config) -> NetworkDefinition:
    """Return the network of a PARD-2 draft model. Inputs: `embedding`, and the hidden states of a feature (`feature_inputs`)."""

    def define_network(ops: Ops[Value]) -> Mapping[str, Value]:
        x, layers = ops.input(EMBEDDING, config.layers.hidden_size), config.layers
        hidden_states = [ops.input(name, config.target_hidden_size) for name in config.feature_inputs]
        (projected,) = ops.linear(ops.concat(*(hidden_states[index] for index in config.hidden_state_order)), "target_proj")
        x = ops.add(x, ops.scale(projected, config.scale))
        for index, layer in enumerate(layers.layers):
            x = decoder_layer(ops, layer, x, index)
        hidden = ops.rms_norm(x, "final_norm")
        logits = ops.lm_head(ops.logits_rows(hidden), "embedding" if layers.tied_embeddings else "lm_head")
        return {FEATURE: hidden, LOGITS: logits}

    return define_network


def open_pard2(files: HeadFiles, target: LoadedTarget) -> ParallelDrafter:
    """Create the drafter for a loaded target from the files of a PARD-2 draft model.

    Raises:
        CheckpointError: tensors or config values are missing or damaged.
        IncompatibleDrafterError: the draft model was made for another target.
    """
    directory, config = files.config_path.parent, read_pard2_config(files, target.runtime.config)
    if any(directory.glob("tokenizer*")):  # AMD's training code saves no tokenizer, because the model uses the target's
        check_tokenizer(files.path, compare_vocabularies(target.tokenizer, Tokenizer.open(directory)))
    config = replace(config, layers=config.layers.for_context(target.max_model_len))
    stored = open_pard2_weights(files, config)
    weights = target.quantize(stored, (*weight_files(directory), directory / PROJECTION_FILE))
    kv_cache_dtype = default_kv_cache_dtype(config.layers, stored)
    placement: HeadPlacement = {**target.placement, "lm_head_source": None}
    runtime = load_head(pard2_network(config), config.layers, weights, kv_cache_dtype=kv_cache_dtype, **placement)
    head = RecurrentHead(
        config, runtime, runtime, weights["embedding.weight"], target_ids=None, masked_pair=MaskedFeaturePair(config.mask_token_id, None)
    )
    return ParallelDrafter(head, target.cache, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)
