"""Networks of EAGLE heads, composed from the blocks of a runtime.

Pair t is token t + 1 with the target's feature of position t. It yields the distribution of token t + 2 and a draft of the feature of
position t + 1. The next pair takes that feature if the target has not computed it yet.
"""

from collections.abc import Mapping

from paceline.drafters.eagle.checkpoint import EagleCheckpoint
from paceline.drafters.eagle.config import EagleConfig
from paceline.drafters.recurrent_heads.head import BOUNDARY, EMBEDDING, FEATURE, MaskedPair, RecurrentHead
from paceline.models.config import ModelConfig
from paceline.models.weights import AnyTensor, Weights
from paceline.runtimes.base import Network
from paceline.runtimes.decoder import LOGITS, Blocks, NetworkDefinition, Value, decoder_layer
from paceline.runtimes.load import load_head


def open_eagle_head(
    checkpoint: EagleCheckpoint,
    target: ModelConfig,
    target_weights: Weights,
    *,
    num_threads: int,
    max_model_len: int,
    device: str = "cpu",
    lm_head_of: Network | None = None,
) -> RecurrentHead:
    """Load the networks of a head, with the target's matrices in place of those it has none of.

    Args:
        max_model_len: positions to prepare for.
        device: "cpu" or "cuda".
        lm_head_of: see `load_head`; for heads without a vocabulary matrix.
    """
    config, soft_cap = checkpoint.config, None
    tensors: dict[str, AnyTensor] = dict(checkpoint.weights)
    embedding = tensors.pop("embedding.weight", None)
    if not config.has_fc_bias:
        tensors.pop("fc.bias", None)
    if "lm_head.weight" in tensors:
        lm_head_of = None
    else:
        tensors["lm_head.weight"] = target_weights["embedding.weight" if target.tied_embeddings else "lm_head.weight"]
        soft_cap = target.logit_soft_cap
    runtime = load_head(
        true_pair_network(config, soft_cap),
        config.layers,
        Weights(tensors),
        num_threads=num_threads,
        max_model_len=max_model_len,
        device=device,
        lm_head_of=lm_head_of,
    )
    masked = None
    if config.mask_token_id is not None and checkpoint.mask_feature is not None:
        masked = MaskedPair(config.mask_token_id, checkpoint.mask_feature)
    drafted = runtime if config.is_eagle1 or masked else runtime.network_with_same_weights(draft_pair_network(config, soft_cap))
    embedding = target_weights["embedding.weight"] if embedding is None else embedding
    return RecurrentHead(config, runtime, drafted, embedding, target_ids=checkpoint.target_ids, masked=masked)


def true_pair_network(config: EagleConfig, soft_cap: float | None = None) -> NetworkDefinition:
    """Compose pairs with the target's features: inputs `embedding` and, for heads with `fc`, `boundary.0` …, else `feature`.

    Args:
        soft_cap: the target's logit soft cap, if its `lm_head` is used.
    """

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        if not config.boundaries:
            return _run_layers(blocks, config, blocks.input(FEATURE, config.layers.hidden_size), soft_cap)
        chunks = [blocks.input(f"{BOUNDARY}.{chunk}", config.feature_size) for chunk in range(len(config.boundaries))]
        if config.has_boundary_norms:
            chunks = [blocks.rms_norm(value, f"fc_norm.{chunk}") for chunk, value in enumerate(chunks)]
        joined = blocks.concat(*chunks)
        if config.has_concat_norm:
            joined = blocks.rms_norm(joined, "input_norm")
        (feature,) = blocks.linear(joined, "fc")
        return _run_layers(blocks, config, feature, soft_cap)

    return compose


def draft_pair_network(config: EagleConfig, soft_cap: float | None = None) -> NetworkDefinition:
    """Compose pairs with this head's own outputs as features: inputs `embedding` and `feature`."""

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        return _run_layers(blocks, config, blocks.input(FEATURE, config.layers.hidden_size), soft_cap)

    return compose


def _run_layers(blocks: Blocks[Value], config: EagleConfig, feature: Value, soft_cap: float | None) -> Mapping[str, Value]:
    """Return `feature` [T, Hd] for the next pairs and `logits` [R, Vd] of the requested rows."""
    layers = config.layers
    embedding = blocks.input(EMBEDDING, layers.hidden_size)
    first_layer = _eagle1_first_layer if config.is_eagle1 else _eagle3_first_layer
    x = first_layer(blocks, config, embedding, feature)
    for layer in range(1, layers.num_layers):
        x = decoder_layer(blocks, layers.layers[layer], x, layer)
    out = blocks.rms_norm(x, "final_norm") if config.has_final_norm else x
    logits = blocks.lm_head(blocks.logits_rows(out), "lm_head")
    if soft_cap is not None:
        logits = blocks.soft_cap(logits, soft_cap)
    return {FEATURE: out if config.normed_recurrence else x, LOGITS: logits}


def _eagle1_first_layer(blocks: Blocks[Value], config: EagleConfig, embedding: Value, feature: Value) -> Value:
    """EAGLE: embedding first; attention reads the mixture without a norm (Li et al. 2024, arXiv:2401.15077, section 4.1).

    Norms of the halves and of the mixture were added by other trainers.
    """
    if config.has_embedding_norm:
        embedding = blocks.rms_norm(embedding, "embedding_norm")
    if config.has_feature_norm:
        feature = blocks.rms_norm(feature, "feature_norm")
    (mixed,) = blocks.linear(blocks.concat(embedding, feature), "fc")
    return decoder_layer(blocks, config.layers.layers[0], mixed, 0, normed=None if config.has_input_norm else mixed)


def _eagle3_first_layer(blocks: Blocks[Value], config: EagleConfig, embedding: Value, feature: Value) -> Value:
    """EAGLE-3: attention reads both halves, each normed, embedding first (Li et al. 2025, arXiv:2503.01840, section 3.1)."""
    half = blocks.rms_norm(embedding, "layers.0.attention_norm") if config.has_embedding_norm else embedding
    normed = blocks.rms_norm(feature, "layers.0.hidden_norm")
    stream = normed if config.norm_before_residual else feature
    return decoder_layer(blocks, config.layers.layers[0], stream, 0, normed=blocks.concat(half, normed))
