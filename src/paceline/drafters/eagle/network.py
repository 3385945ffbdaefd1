"""Networks of EAGLE heads, composed from the operations of a runtime.

The head's input at position t is a feature pair: token t + 1, and the feature (hidden state) of position t. It predicts token t + 2 and the
feature of position t + 1. The next pair uses the predicted feature if the target has not computed that feature yet.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from paceline.drafters.eagle.checkpoint import EagleCheckpoint
from paceline.drafters.eagle.config import EagleConfig
from paceline.drafters.recurrent_heads.head import EMBEDDING, FEATURE, MaskedFeaturePair, RecurrentHead
from paceline.models.config import ModelConfig
from paceline.models.weights import AnyTensor, Weights
from paceline.runtimes.decoder import LOGITS, NetworkDefinition, Ops, Value, decoder_layer
from paceline.runtimes.load import HeadPlacement, load_head


def open_eagle_head(
    checkpoint: EagleCheckpoint, target: ModelConfig, target_weights: Weights, **placement: Unpack[HeadPlacement]
) -> RecurrentHead:
    """Load the networks of a head. It uses the target's embedding and lm_head if it has none of its own."""
    config, soft_cap = checkpoint.config, None
    tensors: dict[str, AnyTensor] = dict(checkpoint.weights)
    embedding = tensors.pop("embedding.weight", None)
    if not config.has_fc_bias:
        tensors.pop("fc.bias", None)
    if "lm_head.weight" in tensors:
        placement["lm_head_source"] = None
    else:
        tensors["lm_head.weight"] = target_weights["embedding.weight" if target.tied_embeddings else "lm_head.weight"]
        soft_cap = target.logit_soft_cap
    runtime = load_head(target_feature_network(config, soft_cap), config.layers, Weights(tensors), **placement)
    masked_pair = None
    if config.mask_token_id is not None and checkpoint.mask_feature is not None:
        masked_pair = MaskedFeaturePair(config.mask_token_id, checkpoint.mask_feature)
    draft_network = runtime
    if not config.is_eagle1 and masked_pair is None:
        draft_network = runtime.network_with_same_weights(target_feature_network(replace(config, layer_boundaries=()), soft_cap))
    embedding = target_weights["embedding.weight"] if embedding is None else embedding
    return RecurrentHead(config, runtime, draft_network, embedding, target_ids=checkpoint.target_ids, masked_pair=masked_pair)


def target_feature_network(config: EagleConfig, soft_cap: float | None = None) -> NetworkDefinition:
    """Return the network that reads the target's features. A head that reads no layer boundaries uses it for predicted features too.

    Its inputs are `embedding` and the feature: `boundary.0`, … if the head reads layer boundaries, else `feature`.
    `soft_cap`: the target's soft cap of logits, if the target's lm_head is used.
    """

    def define_network(ops: Ops[Value]) -> Mapping[str, Value]:
        if not config.layer_boundaries:
            return _run_layers(ops, config, ops.input(FEATURE, config.layers.hidden_size), soft_cap)
        hidden_states = [ops.input(name, config.target_hidden_size) for name in config.feature_inputs]
        if config.has_boundary_norms:
            hidden_states = [ops.rms_norm(value, f"fc_norm.{index}") for index, value in enumerate(hidden_states)]
        features = ops.concat(*hidden_states)
        if config.has_concat_norm:
            features = ops.rms_norm(features, "input_norm")
        (feature,) = ops.linear(features, "fc")
        return _run_layers(ops, config, feature, soft_cap)

    return define_network


def _run_layers(ops: Ops[Value], config: EagleConfig, feature: Value, soft_cap: float | None) -> Mapping[str, Value]:
    """Compose decoder layers and lm_head. Results: predicted `feature` [T, E of the head], `logits` [R, Vd] of the requested rows."""
    layers = config.layers
    embedding = ops.input(EMBEDDING, layers.hidden_size)
    first_layer = _eagle1_first_layer if config.is_eagle1 else _eagle3_first_layer
    x = first_layer(ops, config, embedding, feature)
    for layer in range(1, layers.num_layers):
        x = decoder_layer(ops, layers.layers[layer], x, layer)
    out = ops.rms_norm(x, "final_norm") if config.has_final_norm else x
    logits = ops.lm_head(ops.logits_rows(out), "lm_head")
    if soft_cap is not None:
        logits = ops.soft_cap(logits, soft_cap)
    return {FEATURE: out if config.normed_recurrence else x, LOGITS: logits}


def _eagle1_first_layer(ops: Ops[Value], config: EagleConfig, embedding: Value, feature: Value) -> Value:
    """Compose the first layer of EAGLE-1: `fc` mixes [embedding, feature] into the layer's input (arXiv:2401.15077, section 4.1).

    The paper's head normalises neither embedding nor feature nor the layer's input. Heads of other training code may normalise them.
    """
    if config.has_embedding_norm:
        embedding = ops.rms_norm(embedding, "embedding_norm")
    if config.has_feature_norm:
        feature = ops.rms_norm(feature, "feature_norm")
    (mixed,) = ops.linear(ops.concat(embedding, feature), "fc")
    return decoder_layer(ops, config.layers.layers[0], mixed, 0, normed=None if config.has_input_norm else mixed)


def _eagle3_first_layer(ops: Ops[Value], config: EagleConfig, embedding: Value, feature: Value) -> Value:
    """Compose the first layer of EAGLE-3: attention reads [norm(embedding), norm(feature)] (arXiv:2503.01840, section 3.1)."""
    normed_embedding = ops.rms_norm(embedding, "layers.0.attention_norm") if config.has_embedding_norm else embedding
    normed = ops.rms_norm(feature, "layers.0.hidden_norm")
    residual = normed if config.norm_before_residual else feature
    return decoder_layer(ops, config.layers.layers[0], residual, 0, normed=ops.concat(normed_embedding, normed))
