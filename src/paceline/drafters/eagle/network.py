"""The networks of EAGLE heads, for the blocks of a runtime. Pure forward: rows in, rows out.

Pair t is token t + 1 with the target's feature of position t. It outputs the distribution of token t + 2 and a guess of the feature of
position t + 1, which the next pair takes where the target has not computed that feature yet.
"""

from collections.abc import Mapping

from paceline.drafters.eagle.config import EagleConfig
from paceline.drafters.pairs.head import BOUNDARY, EMBEDDING, FEATURE
from paceline.runtimes.decoder import LOGITS, Blocks, Compose, Value, decoder_layer


def true_pairs(config: EagleConfig, soft_cap: float | None = None) -> Compose:
    """Pairs whose features are the target's: inputs `embedding` and, where there is `fc`, `boundary.0` …, else `feature`.

    Args:
        soft_cap: the target's logit soft cap, if its `lm_head` is used.
    """

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        if not config.boundaries:
            return _pairs(blocks, config, blocks.input(FEATURE, config.layers.hidden_size), soft_cap)
        chunks = [blocks.input(f"{BOUNDARY}.{chunk}", config.feature_size) for chunk in range(len(config.boundaries))]
        if config.norms_chunks:
            chunks = [blocks.rms_norm(value, f"fc_norm.{chunk}") for chunk, value in enumerate(chunks)]
        joined = blocks.concat(*chunks)
        if config.norms_features:
            joined = blocks.rms_norm(joined, "input_norm")
        (feature,) = blocks.linear(joined, "fc")
        return _pairs(blocks, config, feature, soft_cap)

    return compose


def drafted_pairs(config: EagleConfig, soft_cap: float | None = None) -> Compose:
    """Pairs whose features are this head's own outputs: inputs `embedding` and `feature`."""

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        return _pairs(blocks, config, blocks.input(FEATURE, config.layers.hidden_size), soft_cap)

    return compose


def _pairs(blocks: Blocks[Value], config: EagleConfig, feature: Value, soft_cap: float | None) -> Mapping[str, Value]:
    """Results: `feature` [T, Hd] for the pairs behind these, `logits` [R, Vd] of the rows wanted."""
    layers = config.layers
    embedding = blocks.input(EMBEDDING, layers.hidden_size)
    first_layer = _first_layer if config.is_first else _first_layer3
    x = first_layer(blocks, config, embedding, feature)
    for layer in range(1, layers.num_layers):
        x = decoder_layer(blocks, layers.layers[layer], x, layer)
    out = blocks.rms_norm(x, "final_norm") if config.has_final_norm else x
    logits = blocks.lm_head(blocks.logits_rows(out), "lm_head")
    if soft_cap is not None:
        logits = blocks.soft_cap(logits, soft_cap)
    return {FEATURE: out if config.normed_recurrence else x, LOGITS: logits}


def _first_layer(blocks: Blocks[Value], config: EagleConfig, embedding: Value, feature: Value) -> Value:
    """EAGLE: embedding first, and attention reads the mixture without a norm (Li et al. 2024, arXiv:2401.15077, section 4.1).

    Norms of the halves and of the mixture were added by other trainers.
    """
    if config.norms_embedding:
        embedding = blocks.rms_norm(embedding, "embedding_norm")
    if config.norms_feature:
        feature = blocks.rms_norm(feature, "feature_norm")
    (mixed,) = blocks.linear(blocks.concat(embedding, feature), "fc")
    return decoder_layer(blocks, config.layers.layers[0], mixed, 0, normed=None if config.norms_mixture else mixed)


def _first_layer3(blocks: Blocks[Value], config: EagleConfig, embedding: Value, feature: Value) -> Value:
    """EAGLE-3: attention reads both halves, each normed, embedding first (Li et al. 2025, arXiv:2503.01840, section 3.1)."""
    half = blocks.rms_norm(embedding, "layers.0.attention_norm") if config.norms_embedding else embedding
    normed = blocks.rms_norm(feature, "layers.0.hidden_norm")
    stream = normed if config.norm_before_residual else feature
    return decoder_layer(blocks, config.layers.layers[0], stream, 0, normed=blocks.concat(half, normed))
